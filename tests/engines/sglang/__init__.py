"""A real SGLang server on the CPU with kvtier under it: make test-sglang."""
