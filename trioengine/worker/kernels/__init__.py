"""What a step computes beside its matrix products: attention, norms, rotation, activation; once for each backend."""
