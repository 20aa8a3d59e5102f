"""Measure kvtier against physical limits and peers. Not installed.

``kvtier bench serve``, in ``kvtier.tools.bench_serve``, measures a user's own machine. README.md
describes the method.
"""

from __future__ import annotations
