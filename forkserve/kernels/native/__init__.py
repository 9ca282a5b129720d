"""Kernels of the bundled engine in C++, bound with ctypes; see docs/engine.md."""
