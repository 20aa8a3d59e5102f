"""Experiments that a person can run: what the cache saves, what it costs, whether it is right.

``serve.py`` is the place to start: it runs the experiments one after another and collects a
``ServeResult``, from which the table, the JSON object and the HTML report are made.
"""

from __future__ import annotations

from kvtier.bench.options import BenchError, Experiment, ServeOptions
from kvtier.bench.result import ServeResult
from kvtier.bench.serve import run_serve

__all__ = ["BenchError", "Experiment", "ServeOptions", "ServeResult", "run_serve"]
