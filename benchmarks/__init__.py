"""What kvtier must reach, measured. See README.md for the method."""

from __future__ import annotations
