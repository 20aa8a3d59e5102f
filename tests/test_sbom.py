"""The check of a wheel's bill of materials; ``make test-wheel`` makes one."""

from __future__ import annotations

import copy
from typing import Any

from scripts.sbom import missing_in

WANTED = ("numpy", "blake3", "typer", "rich", "prometheus_client")
BILL: dict[str, Any] = {
    "metadata": {"component": {"name": "kvtier", "version": "0.1.0"}},
    "components": [{"name": name, "version": "1", "purl": f"pkg:pypi/{name}@1"} for name in WANTED],
}


def test_a_bill_with_all_that_kvtier_requires_is_complete() -> None:
    assert missing_in(BILL) == []


def test_what_a_bill_lacks_is_named() -> None:
    bill = copy.deepcopy(BILL)
    del bill["components"][0]
    del bill["components"][0]["purl"]
    del bill["metadata"]["component"]["version"]
    assert missing_in(bill) == [
        "numpy is not in it",
        "blake3 has no version or address",
        "its subject is not kvtier of a version",
    ]
