"""See it run: an engine's metrics, read twice, make a picture of what its cache does.

    /metrics --> Reading --> History --> Picture --> the page, `kvtier top`, JSON

The same for kvtier's own server, vLLM and SGLang. Pure but for ``scrape`` and ``local``.
"""
