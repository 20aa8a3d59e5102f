"""Identity of a model's weights, by all bytes of the files that determine its KV.

    files.py       which files these are, and their stamps
    content.py     their bytes, hashed in parallel
    code.py        packages of code outside a model's folder
    memory.py      their digests by stamp, in the user's cache folder
    identify.py    start here: what is known at once, what is read, what is verified afterwards

Engines and connectors put the result into their namespace. Nothing here depends on an engine.
"""

from kvtier.identity.code import UnknownCodeError, code_digest
from kvtier.identity.files import GRAIN_NS, is_counted, process_start_ns
from kvtier.identity.identify import Basis, Identification, Identity, unknown
from kvtier.identity.memory import WeightsMemory

__all__ = [
    "GRAIN_NS",
    "Basis",
    "Identification",
    "Identity",
    "UnknownCodeError",
    "WeightsMemory",
    "code_digest",
    "is_counted",
    "process_start_ns",
    "unknown",
]
