"""Under SGLang, in two ways: a disk below its own hierarchical cache, or in the place of that.

    storage.py       the disk below: what its controller calls
    pool_slab.py     one pool: its pages, and the slab that keeps them
    pages.py         where the pages of a host pool lie, in any layout

    linker.py        in its place: between device pools and kvtier's tiers; what its tree calls
    pool_tiers.py    one pool, and the tiers that keep its pages (``common/pool_cache.py``)
    device_pools.py  where the pages of a device pool lie
    loading.py       what goes from host memory to the device, and for whom it is held until then
    layer_counter.py where its forward waits for layers
    promotion.py     what comes from storage to host memory, and for how long it is waited for
    scheduler_hooks.py requests that wait in its queue for that

    prompt_reporting.py what the eviction policy is told of requests, and whether it is;
                     prefetches.py: those that the storage back end is not asked for, too

    prefix_hits.py   where a prompt may be cut, when several pools must agree
    identity.py      what must agree before two processes share a page
    ranks.py         which rank this is; capacity.py: how much of what a user gives is its own
    prefill.py       what its steps take, for the planner, and which requests end in them
    recording.py     what it was asked, where that is to be recorded
    new_weights.py   when it replaces its weights, for what pages are called
    plugin.py        what SGLang calls in each process: hooks, and on a CPU cpu_copies.py
    ascend_copies.py those who ask for it have its own pools' copies on Ascend by batch calls;
                     ascend_parts.py: where these pools have a page of a layer
    contract.py      what all of them rely on; compared before anything else (entry.py)
    settings.py      what a user may set
    unsupported.py   what can't be served, and why

How the words translate. What SGLang calls a *page* is a *block* elsewhere in kvtier: what one key
names. A *pool* is what a group is elsewhere. SGLang's own host pool is its L2, and its tree decides
what is there; with the linker there is none, and host memory is kvtier's.
"""
