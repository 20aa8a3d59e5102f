"""Benchmarks of eviction policies on traces."""
