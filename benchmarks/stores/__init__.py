"""Benchmarks of remote stores."""
