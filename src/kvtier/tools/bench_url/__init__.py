"""``kvtier bench url``: load test of any OpenAI-compatible server.

Start with ``load.py``: it sends conversations that share a prefix, several at a time.
``exchange.py`` is one streamed request, ``result.py`` the figures.
"""
