"""See it run: an engine's metrics, read twice, make a picture of what its cache does.

    /metrics --> Reading --> History --> Picture --> the page, `kvtier top`, JSON

The same for kvtier's own server, vLLM and SGLang. Pure but for ``scrape`` and ``local``.
"""

from __future__ import annotations

from kvtier.live.history import History
from kvtier.live.make import make_picture
from kvtier.live.picture import Picture
from kvtier.live.reading import Reading

__all__ = ["History", "Picture", "Reading", "make_picture"]
