"""Pure-Python twins of the native functions: fall-back where nothing was compiled, and oracle."""

from __future__ import annotations
