"""Parts that extend vLLM's own host tier instead of replacing it.

``secondary.py`` is a bounded, checked, restart-safe disk tier below it, over
``common/storage_only.py``. ``policy.py`` is an eviction policy for it, over ``capacity.py``. Only
these two adapters know vLLM.
"""
