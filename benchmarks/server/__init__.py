"""Benchmarks of kvtier's own server."""
