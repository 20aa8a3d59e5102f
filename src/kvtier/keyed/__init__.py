"""Cache for engines that bring their own block keys."""
