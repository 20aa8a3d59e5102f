"""Under SGLang, in two ways: a disk below its own hierarchical cache, or in the place of that.

    storage.py           the disk below: calls of its controller
    pool_slab.py         one pool: its pages, and the slab that stores them
    pages.py             addresses of a host pool's pages, in any layout
    prefetches.py        requests of which the eviction policy is told, by a hook

    linker.py            in its place: between device pools and kvtier's tiers; calls of its tree
    pool_tiers.py        one device pool, and the tiers that keep its pages (common/pool_cache.py)
    device_pools.py      addresses of a device pool's pages
    promotion.py         pages that come from storage to host memory, and who waits for them
    scheduler_hooks.py   holds these requests in SGLang's queue
    loading.py           pages that go from host memory to the device, and for whom they are held
    layer_counter.py     the forward waits for layers here
    prompt_reporting.py  tells the eviction policy of requests

    prefix_hits.py       cuts of a prompt on which several pools agree
    identity.py          facts that must agree before two processes share a page
    ranks.py             this rank; capacity.py: its share of what a user gives; rank_metrics.py
    prefill.py           times of steps, for the planner, and the requests that end in them
    recording.py         requests, if they are to be recorded
    new_weights.py       forgets pages when SGLang replaces its weights
    plugin.py            hooks in each process of SGLang's; on a CPU cpu_copies.py
    ascend_copies.py     copies of its own pools on Ascend, by batch calls; ascend_parts.py
    contract.py          what all of them rely on; compared before anything else (entry.py)
    settings.py          options; unsupported.py: combinations that can't be served

How the words translate. What SGLang calls a *page* is a *block* elsewhere in kvtier: what one key
names. A *pool* is what a group is elsewhere. SGLang's own host pool is its L2, and its tree decides
what is there; with the linker there is none, and host memory is kvtier's.
"""
