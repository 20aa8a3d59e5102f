"""Cache for engines that bring their own block keys; begin with ``block_cache.py``."""
