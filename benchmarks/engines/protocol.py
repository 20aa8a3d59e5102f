"""Protocol of an engine's server: streamed answers, metrics, the end of its log, its processes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

ERROR = re.compile(r"\b([\w.]*(?:Error|Exception)\b: .+)")


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to one request."""

    ttft_ms: float
    """Time until the first token arrived."""
    total_ms: float
    cached_tokens: int
    """Cached tokens of the prompt, as the engine counts them."""
    num_tokens: int
    texts: tuple[str, ...]
    steps: tuple[Mapping[str, float], ...]
    """For each generated token, its log-probability and those of its rivals."""


def read_answer(events: Sequence[Mapping[str, Any]], ttft_ms: float, total_ms: float) -> Answer:
    """Return the answer from the events of a streamed completion with usage."""
    texts: list[str] = []
    steps: list[Mapping[str, float]] = []
    usage: Mapping[str, Any] = {}
    for event in events:
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            logprobs = choice.get("logprobs")
            if logprobs:
                texts += logprobs["tokens"]
                steps += logprobs["top_logprobs"]
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        ttft_ms,
        total_ms,
        details.get("cached_tokens") or 0,
        usage.get("completion_tokens") or 0,
        tuple(texts),
        tuple(steps),
    )


def read_counters(text: str) -> dict[str, float]:
    """Return metrics in Prometheus' text format, summed over labels."""
    found: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] += sample.value
    return dict(found)


def read_by_label(text: str, metric: str, label: str) -> dict[str, float]:
    """Return one metric of the same format, summed by the values of a label."""
    found: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == metric:
                found[sample.labels.get(label, "")] += sample.value
    return dict(found)


def last_error(log: str) -> str:
    """Return the innermost reason in the log of a process that ended."""
    errors = [match[1] for line in log.splitlines() if (match := ERROR.search(line))]
    # vLLM's last errors only report that another process ended.
    telling = [
        error for error in errors if "Engine core" not in error and "WorkerProc" not in error
    ]
    lines = [line for line in log.splitlines() if line.strip()]
    return (telling or errors or lines or ["it ended without a word"])[-1].strip()


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the machine."""

    pid: int
    parent: int
    started: int
    """Ticks since the machine's start. Together with the pid it identifies a process uniquely."""


def cpu_s_of(pid: int) -> float:
    """Return user and system seconds of a process' threads, without threads that have ended.

    The resolution is a nanosecond, because a request is too short for ticks.
    """
    nanoseconds = 0
    with suppress(OSError):  # it ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                nanoseconds += int((thread / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def read_process(stat: str) -> Process:
    """Return the process in the text of ``/proc/PID/stat``."""
    pid, _, rest = stat.partition(" (")
    fields = rest.rpartition(") ")[2].split()  # from the third on: state, parent, ...
    return Process(int(pid), int(fields[1]), int(fields[19]))


def running_processes() -> list[Process]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                found.append(read_process((folder / "stat").read_text()))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def family_of(pid: int, processes: Iterable[Process]) -> list[Process]:
    """Return a process and all processes below it."""
    children: defaultdict[int, list[Process]] = defaultdict(list)
    by_pid = {}
    for process in processes:
        children[process.parent].append(process)
        by_pid[process.pid] = process
    family = [by_pid[pid]] if pid in by_pid else []
    for each in family:  # grows while it is walked
        family += children[each.pid]
    return family
