"""``kvtier bench url``: load for any OpenAI-compatible server, and what it answered.

``load.py`` is the place to start: it asks conversations that share a beginning, several at a time.
``exchange.py`` is one streamed request, ``result.py`` the figures.
"""
