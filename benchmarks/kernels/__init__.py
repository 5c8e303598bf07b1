"""Benchmarks of `sparse_kernels`, one file per operation: `python -m benchmarks.kernels [operation ...]`."""
