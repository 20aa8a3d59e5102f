"""Pure-Python equivalents of the native functions: fall-back and test oracle."""

from __future__ import annotations
