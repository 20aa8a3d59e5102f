"""Cost and gain of one cache for all engines of a machine: `python -m benchmarks.node`."""
