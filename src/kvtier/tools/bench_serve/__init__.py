"""Experiments of ``kvtier bench serve`` and ``kvtier bench copy``.

They are installed with kvtier, for a user's own model and machine. Comparisons with limits and
other projects are in ``benchmarks/``, which is not installed.

Start with ``serve.py``: it runs the experiments one after another and collects a ``ServeResult``,
from which the table, the JSON object and the HTML report are made. ``copies.py`` measures only a
device's copies, and needs torch only if the device does.
"""
