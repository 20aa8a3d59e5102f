"""Programs around the cache: benchmarks of serving, replay, the dashboard."""
