"""Parts that the connectors of all engines share.

storage_only.py  cache of one storage tier, whose memory an engine lends for each job; holds.py:
                 blocks that were reported and must not be evicted yet
blocking_calls.py  calls to it for an engine's threads, which wait; reads of a slab that another
                 process owns
pool_copies.py   copies between an engine's device pool and a cache; paged_pool.py: addresses of its
                 pages
names.py         names of blocks outside the process, by the weights (weights.py)
settings.py      settings of a user; opening.py: opens a disk without which an engine still serves
contract.py      the parts of an engine that a connector relies on, compared with the installed one
"""
