"""Parts that connectors share. They translate for any engine.

block_slab.py    a storage tier as jobs over rows of an engine's memory, with holds.py for blocks
                 that somebody was told of; the ladder below it decides
slab_calls.py    the same for threads that wait for their calls, with call_memory.py for blocks that
                 lie anywhere; and reads of a slab that another process owns
pool_cache.py    an engine's device pool over host memory and storage, with paged_pool.py for where
                 its bytes lie
names.py         what blocks are called outside the process, by the weights (weights.py)
settings.py      what a user may set; opening.py: a disk that an engine serves without, too
contract.py      what a connector relies on in its engine, compared with the one that is installed
"""
