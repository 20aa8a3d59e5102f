"""``kvtier bench serve``: the experiments, one after another."""

from __future__ import annotations

import time
from datetime import datetime

from kvtier.serve_bench.accuracy import measure_accuracy
from kvtier.serve_bench.engines import probe
from kvtier.serve_bench.machine import load_average, machine_facts
from kvtier.serve_bench.options import Experiment, ServeOptions
from kvtier.serve_bench.overhead import measure_overhead
from kvtier.serve_bench.overlap import measure_overlap
from kvtier.serve_bench.progress import Progress, Silence
from kvtier.serve_bench.result import ServeResult
from kvtier.serve_bench.slow_disk import measure_slow_disk
from kvtier.serve_bench.store import check_store, measure_store
from kvtier.serve_bench.ttft import measure_ttft


def run_serve(
    options: ServeOptions, progress: Progress | None = None, command: str = "kvtier bench serve"
) -> ServeResult:
    """Load the model, run what ``options.experiments`` names, and give what was found.

    command: what the user typed, for the report. Raises ``ConfigError`` for settings that can't
    work, ``BenchError`` where a measurement would not mean what it says.
    """
    progress = progress or Silence()
    began, started = time.monotonic(), datetime.now().astimezone()
    machine = machine_facts()
    setting = probe(options)
    chosen = options.experiments
    if Experiment.STORE in chosen:
        check_store(setting)
    accuracy = measure_accuracy(setting, progress) if Experiment.ACCURACY in chosen else None
    ttft = measure_ttft(setting, progress) if Experiment.TTFT in chosen else None
    overhead = measure_overhead(setting, progress) if Experiment.OVERHEAD in chosen else None
    slow_disk = measure_slow_disk(setting, progress) if Experiment.SLOW_DISK in chosen else None
    overlap = measure_overlap(setting, progress) if Experiment.OVERLAP in chosen else None
    store = measure_store(setting, progress) if Experiment.STORE in chosen else None
    return ServeResult(
        options=options,
        info=setting.info,
        machine={**machine, "load_average_after": load_average()},
        command=command,
        started=started.isoformat(timespec="seconds"),
        wall_s=time.monotonic() - began,
        text=setting.corpus.source,
        accuracy=accuracy,
        ttft=ttft,
        overhead=overhead,
        slow_disk=slow_disk,
        overlap=overlap,
        store=store,
        sample=setting.sample,
    )
