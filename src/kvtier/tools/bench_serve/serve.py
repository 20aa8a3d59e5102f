"""``kvtier bench serve``: the experiments, one after another."""

from __future__ import annotations

import time
from datetime import datetime

from kvtier.tools.bench_serve.accuracy import measure_accuracy
from kvtier.tools.bench_serve.engines import probe
from kvtier.tools.bench_serve.options import Experiment, ServeOptions
from kvtier.tools.bench_serve.overhead import measure_overhead
from kvtier.tools.bench_serve.overlap import measure_overlap
from kvtier.tools.bench_serve.result import ServeResult
from kvtier.tools.bench_serve.slow_disk import measure_slow_disk
from kvtier.tools.bench_serve.store import check_store, measure_store
from kvtier.tools.bench_serve.ttft import measure_ttft
from kvtier.tools.report.machine import load_average, machine_facts
from kvtier.tools.report.progress import NoProgress, Progress


def run_serve(
    options: ServeOptions, progress: Progress | None = None, command: str = "kvtier bench serve"
) -> ServeResult:
    """Load the model, run the experiments in ``options``, and return their results.

    Args:
        options: options of the benchmark.
        progress: shows the progress; by default, nothing.
        command: the user's command, for the report.

    Raises:
        ConfigError: settings can't work.
        BenchError: a measurement would be invalid.
    """
    progress = progress or NoProgress()
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
