"""Models of transformers that are attached: real ``generate`` and pipelines on small models."""
