"""Measurements: of the engine in this process, and of a server."""
