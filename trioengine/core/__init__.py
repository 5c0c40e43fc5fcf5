"""What may happen, and in which order: pure code, the standard library and msgpack alone."""
