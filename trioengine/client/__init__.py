"""The client of a server: sessions and generations like the engine's, each session over a WebSocket of its own."""
