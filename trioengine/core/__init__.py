"""State machines, protocol, messages, configuration and errors: pure code on the standard library and msgpack."""
