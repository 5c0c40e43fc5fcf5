"""Helpers for trio that the engine, its servers and its clients share."""
