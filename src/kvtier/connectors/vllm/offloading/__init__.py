"""Front on vLLM's OffloadingConnector: translates ``v1/kv_offload`` for the parts that both share.

vLLM's half decides which blocks, which groups, when to store and when a request waits. Here its
contexts, keys, look-up results and page lists become kvtier's own.

    manager.py   ``OffloadingManager`` over ``TierManager``    worker.py   its rank's half
    connector.py carries orders and reports, spec.py makes the two halves
"""
