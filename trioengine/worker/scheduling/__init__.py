"""Which tokens are computed in the next step, and where their keys and values lie: pure code, no torch."""
