"""A scheduler of vLLM's that computes prompts on a grid (setting ``grid``): hits equal misses."""
