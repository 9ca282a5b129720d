"""Benchmarks.  Every number stands beside its ceiling or its peer, measured in the same run."""
