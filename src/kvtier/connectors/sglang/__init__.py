"""Connectors for SGLang: a storage back end below HiCache, or a linker that replaces HiCache.

Storage back end:
    storage.py           SGLang's ``HiCacheStorage`` interface, and the slab of each pool
    pages.py             addresses of a host pool's pages, in any layout

Linker:
    linker.py            SGLang's ``UnifiedCacheLinker``: between device pools and kvtier's tiers
    device_pools.py      addresses of a device pool's pages
    promotion.py         promotion of pages from storage to host memory, and waiting requests
    scheduler_hooks.py   holds waiting requests in SGLang's queue
    loading.py           loads of pages from host memory to the device, layer by layer

Both:
    prompt_reporting.py  reports requests to the eviction policy
    prefix_hits.py       cuts of a prompt on which several pools agree
    identity.py          facts that must agree before two processes share a page; names.py
    ranks.py             this rank: its capacities, folders and metrics
    prefill.py           durations of steps, for the planner, and finished requests
    client_hints.py      reads the hints of requests
    recording.py         recorder of requests
    tier_events.py       adds the events of kvtier's tiers to SGLang's
    new_weights.py       forgets pages when SGLang replaces its weights
    plugin.py            installs the hooks in each SGLang process; cpu_copies.py on a CPU
    ascend_copies.py     copies between SGLang's own pools on Ascend; ascend_parts.py
    contract.py          the parts of SGLang that kvtier relies on, checked first (entry.py)
    settings.py          options; unsupported.py: combinations that can't be served

Terms: an SGLang *page* is a *block* elsewhere in kvtier, identified by one key. A *pool* is a group
elsewhere. SGLang's own host pool is its L2, managed by SGLang's tree. The linker has no L2; host
memory is kvtier's.
"""
