"""What GET /metrics says: the engine's counts, read when asked, and histograms of its times."""
