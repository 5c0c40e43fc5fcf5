"""The network front: one port for HTTP and WebSocket. `startup.serve` runs it, `config.ServeConfig` configures it."""
