"""Benchmarks of the disk tier."""
