"""Front of our own on vLLM's ``KVConnectorBase_V1``, which hardly changes from 0.18 on.

It imports nothing of ``v1/kv_offload``.

    scheduler.py  what a request loads and stores     rank.py  copies, orders, reports
    messages.py   what they send each other, with vLLM's own messages of a step
"""
