"""Lines of a log as its program wrote them, out of the records that others made of them.

Container runtimes and journald put a time and a source before each line, and cut long lines into
pieces: containerd and CRI-O (``time stdout P text``, P for a part and F for the last one), Docker
(``{"log": text, "stream": ..., "time": ...}``, where the last piece ends with a line end), and
journald (``time host name[pid]: text``, where nothing marks a piece).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from kvtier.tools.replay.traces.lines import MAX_LINE, TraceLine

_CRI = re.compile(r"(?P<time>[0-9]{4}-\S{15,40}) (?P<stream>stdout|stderr) (?P<tag>[PF])(?::\S*)? ")
_DOCKER_FIELDS = frozenset({"log", "stream", "time", "attrs"})
_JOURNAL = re.compile(
    r"(?P<time>(?:[A-Z][a-z]{2} [ 0-9][0-9] |[0-9]{4}-[0-9]{2}-[0-9]{2}[T ])[0-9:]{8}\S{0,20}) "
    r"(?P<source>\S{1,255} [^\s:\[\]]{1,255}\[[0-9]{1,20}\]): "
)


class LinePieces:
    """Pieces of one line, in their order. A line of more than ``MAX_LINE`` is not kept whole."""

    def __init__(self, first: TraceLine) -> None:
        self._first = first
        self._texts: list[str] = []
        self._length = 0
        self.add(first.text)

    def add(self, text: str) -> None:
        """Add the next piece."""
        self._length += len(text)
        if self._length <= MAX_LINE:
            self._texts.append(text.removesuffix("\n"))

    def line(self, is_whole: bool = True) -> TraceLine:
        """Return the line, with the number and the time of its first piece."""
        first, end = self._first, "\n" if is_whole else ""
        text = "".join(self._texts) + end
        return TraceLine(first.path, first.number, text, first.stamp, first.source)


def log_lines(lines: Iterator[TraceLine]) -> Iterator[TraceLine]:
    """Yield the lines of a log, without what container runtimes and journald put before them.

    Pieces are joined where each says whether it is the last one. The pieces of journald do not.
    """
    unfinished: dict[str, LinePieces] = {}
    for line in lines:
        found = _record(line)
        if found is None:
            yield _without_journal(line)
            continue
        piece, stream, is_last = found
        if (before := unfinished.get(stream)) is not None:
            before.add(piece.text)
            if is_last:
                yield unfinished.pop(stream).line()
        elif is_last:
            yield piece
        else:
            unfinished[stream] = LinePieces(piece)
    for rest in unfinished.values():
        yield rest.line(is_whole=False)


def _record(line: TraceLine) -> tuple[TraceLine, str, bool] | None:
    """Return the text in a container's record, its stream, and whether it is the last piece."""
    text = line.text
    if found := _CRI.match(text):
        piece = line.part(text[found.end() :], found["time"], None)
        return piece, found["stream"], found["tag"] == "F"
    if text.startswith("{") and '"log"' in text and '"stream"' in text:
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if fields.keys() <= _DOCKER_FIELDS and isinstance(fields.get("log"), str):
            told, stream = fields["log"], "stderr" if fields.get("stream") == "stderr" else "stdout"
            return line.part(told, str(fields.get("time")), None), stream, told.endswith("\n")
    return None


def _without_journal(line: TraceLine) -> TraceLine:
    found = _JOURNAL.match(line.text)
    if found is None:
        return line
    return line.part(line.text[found.end() :], found["time"], found["source"])
