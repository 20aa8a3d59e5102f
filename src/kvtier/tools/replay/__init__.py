"""Replay recorded requests, and compute which memory pays for itself.

Start with ``replay.py``. A trace (``traces/``, ``trace.py``) is cut into segments, from which the
hits of LRU at all sizes (``lru.py``) and of the optimum (``policies.py``) are computed. Other
policies are simulated request by request (``policies.py``). ``savings.py`` converts hits to time,
``sizing.py`` time to money. ``evidence.py`` measures how much the trace can tell. ``summary.py``
has the sentences.
"""
