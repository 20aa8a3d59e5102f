"""OpenAI-compatible server on top of the embedded engine."""
