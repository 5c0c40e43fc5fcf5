"""The network front: one port for HTTP and WebSocket. `server.serve` runs it, `config.ServeConfig` configures it."""
