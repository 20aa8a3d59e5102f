"""Live view of a cache, from the metrics of its engine.

    /metrics --> Reading --> History --> Picture --> the page, `kvtier top`, JSON

It works for kvtier's own server, vLLM and SGLang. Only ``scrape``, ``client`` and ``local`` do I/O.
"""
