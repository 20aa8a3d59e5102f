"""The contract with vLLM, compared with sources that match it and are then changed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from kvtier.connectors.common.contract import Contract
from kvtier.connectors.vllm import entry
from kvtier.connectors.vllm.offloading import contract
from kvtier.core.errors import ConfigError
from kvtier.tools.cli.detect import engines

ADVICE = f"use vLLM {contract.OLDEST} to {contract.NEWEST}, or a newer kvtier"


def _written() -> dict[str, str]:
    """Return, by class, sources that match the contract exactly."""
    methods: dict[str, list[str]] = {}
    for table in (contract.OVERRIDDEN, contract.CALLED):
        for name, takes in table.items():
            for method, each in takes.items():
                given = each.parameters.replace("=", "=None").replace("**", "**more")
                methods.setdefault(name, []).append(
                    f"    def {method}(self{', ' * bool(given)}{given}): ..."
                )
    found = {}
    for name in {**methods, **contract.BUILT, **contract.READ}:
        built = contract.BUILT.get(name, ())
        lines = [f"    {each}: object" for each in built]
        others = (each for each in contract.READ.get(name, ()) if each not in built)
        lines += [f"    {other}: object = None" for other in others]
        found[name] = "\n".join([f"class {name}:", *lines, *methods.get(name, []), "    ...", ""])
    return found


@pytest.fixture
def sources(tmp_path: Path) -> Callable[..., Path]:
    """Write a vLLM that matches the contract, except for changes: (class, before, after)."""

    def write(*changes: tuple[str, str, str]) -> Path:
        classes = _written()
        for name, before, after in changes:
            assert before in classes[name], classes[name]
            classes[name] = classes[name].replace(before, after)
        for file in contract.FILES:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).touch()
        (tmp_path / contract.FILES[0]).write_text("\n".join(classes.values()))
        (tmp_path / "_version.py").write_text("__version__ = version = '0.34.0'\n")
        return tmp_path

    return write


def test_vllm_as_it_is_known_differs_in_nothing(sources: Callable[..., Path]) -> None:
    folder = sources()
    assert contract.VLLM.differences(folder) == []
    contract.VLLM.require(folder)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            ("OffloadingManager", "prepare_load(self, keys, req_context)",
             "prepare_load(self, keys, req_context, deadline)"),
            ("OffloadingManager.prepare_load takes (keys, req_context, deadline); "
            "kvtier knows (keys, req_context)"),
        ),
        (
            ("OffloadingManager", "touch(self, keys, req_context)",
             "touch(self, req_context, keys)"),
            "OffloadingManager.touch takes (req_context, keys); kvtier knows (keys, req_context)",
        ),
        (
            ("OffloadingWorker", "wait(self, job_ids)", "wait(self, job_ids, *, timeout=1)"),
            "OffloadingWorker.wait takes (job_ids, timeout=); kvtier knows (job_ids)",
        ),
        (
            ("OffloadingConnector", "    def build_connector_worker_meta(self): ...\n", ""),
            "OffloadingConnector has no build_connector_worker_meta",
        ),
        (
            ("OffloadingSpec", "    def get_worker",
             "    @abstractmethod\n    def get_reader(self): ...\n    def get_worker"),
            "OffloadingSpec wants get_reader, which kvtier has not",
        ),
        (
            ("OffloadingSpecFactory", "module_path, class_name", "loader"),
            ("OffloadingSpecFactory.register_spec takes (name, loader); "
            "kvtier gives it (name, module_path, class_name)"),
        ),
        (
            ("TransferResult", "    job_id: object\n", "    job_id: object\n    rank: object\n"),
            ("TransferResult is made of (job_id, rank, success, transfer_size, transfer_time); "
            "kvtier gives it (job_id, success, transfer_size, transfer_time)"),
        ),
        (
            ("LookupResult", "    RETRY: object = None\n", ""),
            "LookupResult has no RETRY",
        ),
        (
            ("ReqContext", "class ReqContext", "class Context"),
            "there is no ReqContext where kvtier knows it",
        ),
    ],
)  # fmt: skip
def test_each_change_is_one_sentence_with_a_way_out(
    sources: Callable[..., Path], change: tuple[str, str, str], sentence: str
) -> None:
    folder = sources(change)
    assert contract.VLLM.differences(folder) == [f"vLLM 0.34.0: {sentence}: {ADVICE}"]
    with pytest.raises(ConfigError, match="kvtier can't serve this vLLM"):
        contract.VLLM.require(folder)


def test_what_a_version_may_lack_is_no_difference(sources: Callable[..., Path]) -> None:
    folder = sources(
        ("OffloadingWorker", ", expedited=None", ""),
        ("OffloadingManager", "    def get_load_source(self, key, req_context): ...\n", ""),
        ("ReqContext", "    def get_offload_key_position(self, key): ...\n", ""),
        ("ReqContext", "    _offload_key_positions: object = None\n", ""),
        ("CacheHitSource", "class CacheHitSource", "class HitSource"),
    )
    assert contract.VLLM.differences(folder) == []


def test_additions_that_nobody_has_to_know_are_no_difference(
    sources: Callable[..., Path],
) -> None:
    folder = sources(
        ("OffloadingManager", "    def touch", "    def lock(self): ...\n    def touch"),
        ("TransferResult", "    ...\n", "    note: str = ''\n    ...\n"),
        ("OffloadingConfig", "    ...\n", "    max_model_len: int\n    ...\n"),
        ("OffloadingConnectorWorker", "self, kv_caches", "self, kv_caches, hurry=False"),
    )
    assert contract.VLLM.differences(folder) == []


def test_what_a_base_class_has_counts(sources: Callable[..., Path]) -> None:
    folder = sources(
        ("OffloadingConnector", "    def build_connector_worker_meta(self): ...\n", ""),
        ("OffloadingConnector", "class OffloadingConnector:", "class OffloadingConnector(Base):"),
    )
    (folder / contract.FILES[-1]).write_text(
        "class Base:\n    def build_connector_worker_meta(self): ...\n"
    )
    assert contract.VLLM.differences(folder) == []


def test_sources_that_cannot_be_read_are_differences(tmp_path: Path) -> None:
    (tmp_path / "_version.py").write_text("oh no (")
    (tmp_path / contract.FILES[0]).parent.mkdir(parents=True)
    (tmp_path / contract.FILES[0]).write_text("class OffloadingManager(")
    found = contract.VLLM.differences(tmp_path)
    assert (
        f"vLLM of unknown version: there is no OffloadingManager where kvtier knows it: {ADVICE}"
        in found
    )


Installs = Callable[[Path | None], None]


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> Installs:
    """Make a folder the only installed engine, as vLLM; None for no engine."""

    def install(folder: Path | None) -> None:
        monkeypatch.setattr(
            Contract, "installed", lambda self: folder if self is contract.VLLM else None
        )

    return install


def test_classes_are_handed_out_only_after_a_look_at_vllm(
    sources: Callable[..., Path], installs: Installs, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModuleType("kvtier.connectors.vllm.offloading.spec")
    spec.__dict__["KvtierSpec"] = made = object()
    monkeypatch.setitem(sys.modules, "kvtier.connectors.vllm.offloading.spec", spec)
    installs(sources())
    assert entry.KvtierSpec is made
    assert vars(entry).pop("KvtierSpec") is made, "found once"
    installs(sources(("Medium", "CPU: object", "HOST: object")))
    with pytest.raises(ConfigError, match="Medium has no CPU: use vLLM"):
        _ = entry.KvtierSpec
    with pytest.raises(AttributeError, match="no attribute 'KvtierSpecs'"):
        _ = entry.KvtierSpecs


def test_doctor_says_whether_the_installed_vllm_is_served(
    sources: Callable[..., Path], installs: Installs, monkeypatch: pytest.MonkeyPatch
) -> None:
    installs(sources())
    (found,) = engines()
    assert (found.topic, found.found) == ("vllm", "0.34.0")
    assert found.note.endswith("but it was never run with it")
    with monkeypatch.context() as patch:
        patch.setattr(Contract, "was_run_with", lambda self, version: version == "0.34.0")
        note = "served by OffloadingConnector: kvtier vllm-args prints the option for it"
        assert engines()[0].note == note
    installs(None)
    assert engines() == ()


@pytest.mark.parametrize(("version", "known"), [("0.3.1", True), ("0.3", True), ("0.31.0", False)])
def test_a_version_is_known_with_all_its_patches(version: str, known: bool) -> None:
    assert replace(contract.VLLM, run_with=("0.3",)).was_run_with(version) is known
