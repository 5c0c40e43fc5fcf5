"""Helpers of the tests: servers and clients in memory, reference answers, models and images."""
