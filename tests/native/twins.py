"""Fixtures of the native core and of its Python equivalents, which pass the same tests."""

from __future__ import annotations

from typing import Any

import pytest


def both(reference: object, name: str = "") -> Any:
    """Return a fixture: the part of the core of this name, and then ``reference``.

    name: "" for the whole module.
    """

    @pytest.fixture(params=["native", "reference"], scope="module")
    def part(request: pytest.FixtureRequest) -> object:
        if request.param == "reference":
            return reference
        core = pytest.importorskip("kvtier._native", reason="the native core is not built")
        return getattr(core, name) if name else core

    return part
