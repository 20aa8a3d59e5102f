"""What kvtier must reach, measured against physical limits and peers: for this repository, not
installed. What users run on their own machine is ``kvtier bench serve``, in ``kvtier.serve_bench``.
See README.md for the method."""

from __future__ import annotations
