"""The lifecycle fuzzer: hypothesis drives the real actors, and acts between any two scheduler passes."""
