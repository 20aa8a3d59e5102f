"""Memory tiers: slots in an arena of host memory, or in memory of another owner."""
