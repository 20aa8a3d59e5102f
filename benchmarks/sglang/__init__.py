"""Benchmarks under SGLang."""
