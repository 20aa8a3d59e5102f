"""Under SGLang: its host pools' pages on disk, behind its own hierarchical cache.

    storage.py     what SGLang's controller calls; the only one that knows its classes
    shelf.py       one pool: its pages, and the slab that keeps them
    hits.py        where a prompt may be cut, when several pools must agree
    pages.py       where the pages of a pool lie, in any layout
    identity.py    what must agree before two processes share a page
    moves.py       what calls moved, for SGLang's metrics
    prefill.py     what its steps take, for the planner
    new_weights.py when it replaces its weights, for what pages are called
    plugin.py      what SGLang calls in each process: these hooks, and on a CPU cpu_copies.py
    ascend_copies.py  for those who ask: copies between SGLang's own pools on Ascend, by batch calls
    ascend_parts.py   where these pools have a page of a layer
    contract.py    what all of them rely on; compared before anything else (entry.py)
    settings.py    what a user may set
    refusals.py    what can't be served, and why

How the words translate. What SGLang calls a *page* is a *block* elsewhere in kvtier: what one key
names. A *pool* is what a group is elsewhere. SGLang's own host pool is its L2, and its tree decides
what is there; the slabs below it are kvtier's, one for each rank and pool.
"""
