"""Parts that the connectors of all engines share.

block_slab.py    asynchronous jobs between a storage tier and an engine's host memory; holds.py:
                 blocks that were reported and must not be evicted yet
slab_calls.py    blocking calls to a slab, for an engine's threads; call_memory.py: blocks at any
                 address; and reads of a slab that another process owns
pool_copies.py   copies between an engine's device pool and a cache; paged_pool.py: addresses of its
                 pages
names.py         names of blocks outside the process, by the weights (weights.py)
settings.py      settings of a user; opening.py: opens a disk without which an engine still serves
contract.py      the parts of an engine that a connector relies on, compared with the installed one
"""
