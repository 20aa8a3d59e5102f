"""Blocks in a Mooncake Store."""
