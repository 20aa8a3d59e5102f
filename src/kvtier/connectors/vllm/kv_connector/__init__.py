"""Front of our own on vLLM's ``KVConnectorBase_V1``, which hardly changes from 0.18 on.

It imports nothing of ``v1/kv_offload``.

    scheduler.py  loads and stores of each request    rank.py  copies, orders, reports
    messages.py   messages between them, carried in vLLM's connector metadata
"""
