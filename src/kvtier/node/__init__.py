"""One cache for a machine: a process that owns host memory, disks and stores for all engines.

kvtier node --------- owns the index, the ladder and the memory (``node``, ``server``)
   |  Unix socket     look-ups, leases, reservations (``protocol``); no KV crosses it
engine -------------- maps the memory, and copies itself (``client``, ``tier``)
"""

from __future__ import annotations
