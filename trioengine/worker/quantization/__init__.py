"""How quantized tensors become ordinary ones; models know nothing of it."""
