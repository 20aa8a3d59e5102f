"""N1-N7: what grows with the cache, and how fast.

    python -m benchmarks.scale                         all parts, a table
    python -m benchmarks.scale --parts restart --json -

A part is a module with a ``measure(quick)`` of its own. README.md says the method.
"""
