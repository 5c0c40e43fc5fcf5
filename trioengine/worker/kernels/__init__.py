"""The kernels of a step beside its matrix products: attention, norms, rotation, activation; once for each backend."""
