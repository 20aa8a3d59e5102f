"""Counts the parts of a JSON body while it arrives, before anything is built from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtier.serve.server.errors import ApiError, bad_request

_BRACKETS = b"[]{}"
_NOT_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))
_STEP = np.zeros(256, np.int8)
_STEP[list(b"[{")], _STEP[list(b"]}")] = 1, -1

_IN_NUMBER = b"0123456789+-.eE"
_NUMBERS = bytes(0 if byte in _IN_NUMBER else 1 for byte in range(256))


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a body. text_bytes: of one string, as written in the body."""

    text_bytes: int
    values: int = 262_144
    containers: int = 16_384
    depth: int = 128
    number_characters: int = 64


class Scan:
    """Counts the parts of one body, piece by piece. Raises ``ApiError`` when a limit is exceeded.

    It does not parse JSON. Up to a body's first error it counts what a parser would see, and a
    parser stops there. So parsing a scanned body never costs more than the limits allow.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._carried = b""
        self._in_string = False
        self._string_bytes = 0
        self._depth = self._num_values = self._num_containers = 0

    def add(self, piece: bytes) -> None:
        """Count the next bytes of the body; some 64 KiB at a time take less than a millisecond."""
        # Remove pairs of backslashes: one that is left before a quote escapes it.
        piece = (self._carried + piece).replace(b"\\\\", b"  ")
        self._carried = piece[-1:] if piece.endswith(b"\\") else b""
        if self._carried:
            piece = piece[:-1]
        parts = piece.replace(b'\\"', b"  ").split(b'"')
        first = int(self._in_string)
        self._count_strings(parts[1 - first :: 2], begun=self._in_string)
        self._in_string = bool((first + len(parts) - 1) % 2)
        if not self._in_string:
            self._string_bytes = 0
        self._count_structure(b" ".join(parts[first::2]))

    def _count_strings(self, strings: list[bytes], begun: bool) -> None:
        """Count the strings of a piece; the last one may continue in the next piece.

        begun: whether the first one continues from the previous piece.
        """
        if not strings:
            return
        before = self._string_bytes if begun else 0
        longest = max(before + len(strings[0]), *map(len, strings))
        self._string_bytes = len(strings[-1]) + (before if len(strings) == 1 else 0)
        if longest > self._bounds.text_bytes:
            raise _too_much(
                f"a text of more than {self._bounds.text_bytes} bytes, which is more than the "
                "context can hold; shorten it",
                "context_length_exceeded",
            )

    def _count_structure(self, text: bytes) -> None:
        """Count brackets and commas of a piece. text: the bytes outside of strings."""
        bounds = self._bounds
        self._num_values += text.count(b",")
        if self._num_values >= bounds.values:
            raise _too_much(f"more than {bounds.values} values; send several requests")
        if (b"\0" * (bounds.number_characters + 1)) in text.translate(_NUMBERS):
            raise _too_much(
                f"a number of more than {bounds.number_characters} characters; shorten it"
            )
        brackets = text.translate(None, _NOT_BRACKETS)
        if not brackets:
            return
        steps = _STEP[np.frombuffer(brackets, np.uint8)]
        depths = self._depth + steps.cumsum(dtype=np.int64)
        self._depth = int(depths[-1])
        self._num_containers += int((steps > 0).sum())
        if depths.max() > bounds.depth:
            raise _too_much(f"more than {bounds.depth} levels of lists and objects; flatten it")
        if self._num_containers > bounds.containers:
            raise _too_much(
                f"more than {bounds.containers} lists and objects; send several requests"
            )


def _too_much(what: str, code: str = "request_too_large") -> ApiError:
    return bad_request(f"The body has {what}.", code=code)
