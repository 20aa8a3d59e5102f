"""Choice of the connector for an installed vLLM, and the messages about it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pytest
from typer.testing import CliRunner

from kvtier.connectors.common.contract import Contract
from kvtier.connectors.vllm import entry
from kvtier.connectors.vllm.shared.fronts import OFFLOADING, OWN, choose
from kvtier.core.errors import ConfigError
from kvtier.tools.cli import app
from kvtier.tools.cli.detect import engines
from scripts import engine_versions
from scripts.engine_versions import PARTS, ROOT, Part, read_record

Installs = Callable[..., None]


@pytest.fixture
def installs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installs:
    """Install a vLLM of a version, with so many differences from each contract."""

    def install(version: str, offloading: int, own: int) -> None:
        (tmp_path / "_version.py").write_text(f'__version__ = "{version}"\n')
        numbers = {id(OFFLOADING.contract): offloading, id(OWN.contract): own}

        def differences(self: Contract, folder: Path | None = None) -> list[str]:
            return [
                f"vLLM {version}: thing {at} is gone: use vLLM 1 to 2, or a newer kvtier"
                for at in range(numbers.get(id(self), 0))
            ]

        def installed(self: Contract) -> Path | None:
            return tmp_path if self.package == "vllm" else None

        monkeypatch.setattr(Contract, "differences", differences)
        monkeypatch.setattr(Contract, "installed", installed)

    return install


def _printed(*options: str) -> dict[str, object]:
    done = CliRunner().invoke(app, ["vllm-args", "--json", *options])
    assert done.exit_code == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_offloading_connector_goes_first_where_both_fit(installs: Installs) -> None:
    installs("0.30.0", 0, 0)
    assert choose().front is OFFLOADING
    assert _printed()["kv_connector"] == "OffloadingConnector"
    assert engines()[0].note.startswith("served by OffloadingConnector: ")
    assert _printed("--connector", "KvtierConnector")["kv_connector"] == "KvtierConnector"


def test_older_vllm_gets_our_own_connector_and_the_reason(installs: Installs) -> None:
    installs("0.23.0", 3, 0)
    printed = _printed()
    assert printed["kv_connector"] == "KvtierConnector"
    assert printed["kv_connector_module_path"] == "kvtier.connectors.vllm.entry"
    (found,) = engines()
    assert found.note.startswith(
        "served by KvtierConnector (OffloadingConnector does not fit: thing 0 is gone, and 2 more)"
    )


def test_vllm_that_nothing_fits_is_one_sentence(installs: Installs) -> None:
    installs("0.17.0", 3, 1)
    (found,) = engines()
    assert found.note == "kvtier can't serve it: thing 0 is gone"
    done = CliRunner().invoke(app, ["vllm-args"])
    assert done.exit_code == 2
    assert "kvtier can't serve this vLLM: thing 0 is gone" in " ".join(done.stderr.split())


def test_runner_that_drops_reports_is_refused(
    installs: Installs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installs("0.18.1", 3, 0)
    runner = tmp_path / "v1/worker/gpu/kv_connector.py"
    runner.parent.mkdir(parents=True)
    runner.write_text("def get_finished(): ...")
    assert choose().front is OWN
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    chosen = choose()
    assert chosen.front is None
    assert "unset VLLM_USE_V2_MODEL_RUNNER" in chosen.why
    with pytest.raises(ConfigError, match="unset VLLM_USE_V2_MODEL_RUNNER"):
        _ = entry.KvtierConnector
    runner.write_text("def build_connector_worker_meta(): ...")
    assert choose().front is OWN, "later runners pass them on"


def test_without_vllm_the_options_are_those_of_a_new_one(
    installs: Installs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Contract, "installed", lambda self: None)
    assert _printed()["kv_connector"] == "OffloadingConnector"
    assert engines() == ()


def test_connector_of_another_name_is_refused() -> None:
    done = CliRunner().invoke(app, ["vllm-args", "--connector", "LMCacheConnectorV1"])
    assert done.exit_code == 2
    assert "none of auto, OffloadingConnector, KvtierConnector" in " ".join(done.stderr.split())


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.title)
def test_versions_that_count_as_run_are_those_recorded(part: Part) -> None:
    recorded = read_record().get(part.title, {})
    short = {each.rpartition(".")[0] if part.engine == "vllm" else each for each in recorded}
    assert short <= set(part.contract.run_with)


def test_guides_name_the_versions_of_the_contracts() -> None:
    guide = (ROOT / "docs/guides/vllm.md").read_text(encoding="utf-8")
    for front in (OFFLOADING, OWN):
        (row,) = re.findall(rf"^\| `{front.connector}` \| (.*?) \|", guide, re.MULTILINE)
        assert row == f"{front.contract.oldest} to {front.contract.newest}"


def _report(path: Path, cell: tuple[str, str, str], failure: str = "") -> Path:
    shown = quoteattr(json.dumps(cell))
    properties = f'<properties><property name="shows" value={shown}/></properties>'
    path.write_text(
        f"<testsuites><testsuite><testcase>{properties}{failure}</testcase></testsuite></testsuites>"
    )
    return path


def test_cell_of_the_table_of_shapes_is_what_its_last_test_showed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_versions, "SHAPES", tmp_path / "shapes.json")
    monkeypatch.setattr(engine_versions, "TABLES", ())
    for ranks in ("TP 2", "1 rank"):
        report = _report(tmp_path / "report.xml", ("gemma3", "host", ranks))
        engine_versions.record_shapes("vllm-0.32.0", report)
    assert [*engine_versions.shapes()][2:] == ["| gemma3 | vLLM 0.32.0 | 1 rank, TP 2 |"]
    report = _report(tmp_path / "report.xml", ("gemma3", "host", "TP 2"), "<failure/>")
    engine_versions.record_shapes("vllm-0.32.0", report)
    assert [*engine_versions.shapes()][2:] == ["| gemma3 | vLLM 0.32.0 | 1 rank |"]
