"""This process and its machine: child processes, cores, memory, the user's cache folder."""
