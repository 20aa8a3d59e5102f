"""A node's side in an engine's process."""
