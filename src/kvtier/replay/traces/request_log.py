"""Logs in which vLLM or SGLang wrote the token ids of their requests.

vLLM (``--enable-log-requests``): lines with ``prompt_token_ids: [...]``, written at INFO by older
versions, at DEBUG by newer ones. SGLang (``--log-requests --log-requests-level 3``): lines with
``Receive: obj=GenerateReqInput(... input_ids=[...]``, or JSON with ``request.received``.
Ids are hashed as they are read, with a salt that is never written. How long answers were is not
known.
"""

from __future__ import annotations

import calendar
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError
from kvtier.replay.trace import Trace, TraceBuilder, chained
from kvtier.replay.traces.lines import Line

if TYPE_CHECKING:
    from kvtier.replay.traces.options import ReadOptions

NAME = "request logs of vLLM, SGLang"

# The ids stand behind the prompt's text, which may hold anything: the last ones count.
_VLLM = re.compile(r".*\bprompt_token_ids: (\[[^\]]*\])", re.DOTALL)
_SGLANG = re.compile(r"\bReceive: obj=\w+\(.*\binput_ids=(\[[\d,.\s\[\]]*\])", re.DOTALL)
_SGLANG_JSON = re.compile(r'\{.*"event":\s*"request\.received",.*"input_ids":', re.DOTALL)
_TIME = re.compile(r"(?:(\d{4})-)?(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")


def recognises(line: Line) -> bool:
    return any(pattern.search(line.text) for pattern in (_VLLM, _SGLANG, _SGLANG_JSON))


def read(lines: Iterator[Line], options: ReadOptions, file_number: int) -> Trace:
    builder = TraceBuilder(options.chains.block_tokens, options.coarsen)
    for line in lines:
        prompts = _prompts(line)
        if not prompts:
            continue
        time_s = _time_s(line)
        for prompt in prompts:
            try:
                keys = chained(options.chains.keys(prompt))
            except ConfigError as error:
                line.refuse(str(error))
            builder.add(time_s, keys, len(prompt), 0)
    return builder.build(["The log does not say how long the answers were."])


def _prompts(line: Line) -> list[list[int]]:
    """Token ids of the line's requests; none where it is about something else."""
    if found := _SGLANG_JSON.search(line.text):
        try:
            ids = json.loads(line.text[found.start() :])["obj"]["input_ids"]
        except (ValueError, KeyError, TypeError, RecursionError):
            line.refuse("a request whose JSON can't be read")
    elif found := _SGLANG.search(line.text) or _VLLM.search(line.text):
        try:
            ids = json.loads(found[1])
        except ValueError:
            ids = "..."
        if line.text.startswith(" ... ", found.end()):
            ids = "..."
    else:
        return []
    if not ids:
        return []
    prompts = ids if isinstance(ids, list) and isinstance(ids[0], list) else [ids]
    for prompt in prompts:
        if not isinstance(prompt, list) or not all(type(each) is int for each in prompt):
            line.refuse(
                "the token ids are cut short or no integers: have the server log them in full "
                "(vLLM without --max-log-len, SGLang with --log-requests-level 3)"
            )
    return prompts


def _time_s(line: Line) -> float:
    """Seconds since 1970, or since 1970 and some years where the log does not say which."""
    found = _TIME.search(line.text)
    if found is None:
        line.refuse("a request without a time; the log must say when")
    year, *rest = found.groups()
    month, day, hour, minute, second = map(int, rest[:5])
    fraction = float(f"0.{rest[5]}") if rest[5] else 0.0
    try:
        whole = calendar.timegm((int(year or 2000), month, day, hour, minute, second))
    except ValueError:
        line.refuse(f"{found[0]!r} is no time")
    return whole + fraction
