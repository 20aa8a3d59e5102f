"""Replays what was asked of a server, and says what memory pays for itself.

``replay.py`` is the place to start. A trace (``traces/``, ``trace.py``) is cut into segments, from
which LRU of all sizes (``lru.py``) and the optimum (``policies.py``) follow; other policies are
asked request by request (``policies.py``). ``savings.py`` turns hits into time, ``sizing.py`` time
into money; ``evidence.py`` says how far the trace can be trusted. ``words.py`` has the sentences.
"""
