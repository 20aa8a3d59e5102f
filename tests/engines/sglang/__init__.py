"""Real SGLang servers on the CPU with kvtier: ``make test-sglang``."""
