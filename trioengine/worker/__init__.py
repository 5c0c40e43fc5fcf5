"""The worker: a process of its own that runs PyTorch and speaks msgpack over two pipes. No trio here."""
