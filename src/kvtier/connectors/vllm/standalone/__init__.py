"""For those who keep vLLM's own host tier.

A bounded, checked, restart-safe tier on disk below it (``secondary.py`` over
``common/storage_only.py``), and an eviction policy for it (``policy.py`` over ``capacity.py``).
Only the adapters, ``secondary.py`` and ``policy.py``, know vLLM.
"""
