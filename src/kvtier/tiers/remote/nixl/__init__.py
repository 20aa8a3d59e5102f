"""Blocks in storage that NIXL plug-ins access."""
