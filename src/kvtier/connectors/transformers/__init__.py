"""transformers: every prompt of a model reuses the KV of earlier ones.

attach.py             start here: ``attach``, and the wrapper around ``forward``
prompts.py            which calls begin prompts, and why others are passed through
grid.py               prefill in chunks: restored, or computed and kept
layers.py             KV between transformers' cache layers and blocks
weights_in_memory.py  the identity of a loaded model
"""

from kvtier.connectors.transformers.attached import Attached, AttachedStats, attach

__all__ = ["Attached", "AttachedStats", "attach"]
