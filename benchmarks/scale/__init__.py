"""N1-N7: growth of times and memory with the size of the cache.

    python -m benchmarks.scale                         all parts, a table
    python -m benchmarks.scale --parts restart --json -

A part is a module with a function ``measure(quick)``. See README.md for the method.
"""
