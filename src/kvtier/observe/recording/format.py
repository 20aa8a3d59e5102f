"""File format of a recording: JSON lines, a header followed by one line per request.

    {"kvtier_trace": 1, "block_tokens": 128, "salt": "…", "started": 1764000000.0}
    [seconds since started, input tokens, output tokens, row, keep, "keys"]

A request's keys are the first ``keep`` keys of request ``row`` (0 for the first line after the
header), followed by ``keys``: eight bytes each, little-endian, in base64. docs/formats/trace.md.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MARK = "kvtier_trace"
VERSION = 1
MAX_KNOWN = 1 << 20
"""Keys that the writer remembers to refer to a prefix instead of repeating it: about 100 MB."""


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a recording.

    salt: name of the salt; recordings with equal names have equal keys for equal prefixes.
    started: seconds since 1970.
    """

    block_tokens: int
    salt: str
    started: float

    def line(self) -> str:
        fields = {
            MARK: VERSION,
            "block_tokens": self.block_tokens,
            "salt": self.salt,
            "started": round(self.started, 3),
        }
        return json.dumps(fields) + "\n"


class LineWriter:
    """Formats the requests of one file, in order."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self._num_rows = 0

    def line(
        self, time_s: float, input_tokens: int, output_tokens: int, keys: npt.NDArray[np.uint64]
    ) -> str:
        """Return the line of one request.

        keys: uint64 [n], each of a whole prefix: if one is known, all before it are.
        """
        names = keys.tolist()
        low, high = 0, len(names)  # keys below low are known, key high is not
        while low < high:
            middle = (low + high) // 2
            if names[middle] in self._rows:
                low = middle + 1
            else:
                high = middle
        row = self._rows[names[low - 1]] if low else 0
        if len(self._rows) + len(names) - low > MAX_KNOWN:
            self._rows.clear()
        self._rows.update(dict.fromkeys(names[low:], self._num_rows))
        self._num_rows += 1
        packed = base64.b64encode(keys[low:].astype("<u8").tobytes()).decode()
        fields = [round(time_s, 3), input_tokens, output_tokens, row, low, packed]
        return json.dumps(fields, separators=(",", ":")) + "\n"


def unpacked(text: str) -> npt.NDArray[np.uint64]:
    """Return the keys of a line. Raises ``ValueError`` if they are invalid."""
    return np.frombuffer(base64.b64decode(text, validate=True), "<u8").astype(np.uint64)
