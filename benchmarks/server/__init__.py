"""Benchmarks of real servers, dense and sparse in turn on one machine."""
