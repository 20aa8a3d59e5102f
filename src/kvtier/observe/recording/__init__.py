"""Traces of requests: salted hashes, lengths and times; no text, no token ids.

``Recorder`` writes them during serving, ``kvtier replay`` reads them.
"""

from __future__ import annotations

from kvtier.observe.recording.chains import SALT_VARIABLE, Chains, salt_from_environment
from kvtier.observe.recording.format import MARK, VERSION, Header, LineWriter, unpacked
from kvtier.observe.recording.recorder import LEAST_BYTES, Recorder, check_recording

__all__ = [
    "LEAST_BYTES",
    "MARK",
    "SALT_VARIABLE",
    "VERSION",
    "Chains",
    "Header",
    "LineWriter",
    "Recorder",
    "check_recording",
    "salt_from_environment",
    "unpacked",
]
