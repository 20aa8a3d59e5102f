"""Tools for operators: benchmarks of serving, replay of traces, and the dashboard."""
