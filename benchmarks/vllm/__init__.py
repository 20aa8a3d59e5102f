"""Benchmarks under vLLM."""
