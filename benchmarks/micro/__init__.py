"""Benchmarks of single parts: copies, checksums, the index, the cache without a model."""
