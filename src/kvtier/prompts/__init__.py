"""One request's hold on the cache."""
