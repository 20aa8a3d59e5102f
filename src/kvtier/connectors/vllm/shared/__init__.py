"""Parts that both fronts under vLLM use."""
