"""Benchmarks of the Triton kernels; needs torch, Triton, numpy and rich only."""
