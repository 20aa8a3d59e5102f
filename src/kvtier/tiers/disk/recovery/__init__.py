"""From a slab's journal back to its blocks after a restart."""
