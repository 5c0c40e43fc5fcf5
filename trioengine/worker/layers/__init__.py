"""The kernels that models are made of, each behind one small interface with a plain-torch implementation."""
