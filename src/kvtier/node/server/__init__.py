"""The node's process."""
