"""Types, errors, settings, keys and hints, which every other room uses, and calls of the system."""
