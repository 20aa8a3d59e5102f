"""The cache of engines that bring their own keys."""
