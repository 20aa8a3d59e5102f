"""One function builds every ladder."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kvtier
from kvtier.assembly import build_ladder
from kvtier.errors import UsageError
from kvtier.index import make_key_index
from kvtier.ladder import LadderOptions
from kvtier.tiers import DistantRoom
from kvtier.transfer.ranks import RankMover
from kvtier.types import DISK, HOST

PACKAGE = Path(kvtier.__file__).parent


def _makes_a_ladder(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return any(getattr(call, "id", getattr(call, "attr", "")) == "Ladder" for call in calls)


def test_ladders_are_built_in_one_place() -> None:
    makers = [path for path in sorted(PACKAGE.rglob("*.py")) if _makes_a_ladder(path)]
    assert makers == [PACKAGE / "assembly.py"]


def test_an_index_of_other_tiers_is_refused() -> None:
    index = make_key_index((HOST, DISK), lambda: b"")
    mover = RankMover({}, 1, 1, 1, 0.0, lambda: 0.0)
    with pytest.raises(UsageError, match="host, disk, and the ladder has host;"):
        build_ladder(index, {HOST: DistantRoom(4)}, mover, LadderOptions(1), clock=lambda: 0.0)
