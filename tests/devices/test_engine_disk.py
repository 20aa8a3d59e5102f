"""The embedded engine on a fake accelerator with a disk: equal logits after a restart.

The disk is in place of host memory or beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from kvtier.core.errors import ConfigError
from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.devices import Finding
from kvtier.devices.calibration import calibrate
from kvtier.layout import KVGroup
from kvtier.serve.engine import Engine, EngineConfig
from kvtier.serve.engine.pool import KVPool
from kvtier.tiers.disk.tier import DiskTier
from tests.devices.drivers import make_device
from tests.kit.fakes.storage import STORAGE, StorageFake
from tests.serve.engine.asking import ask, same
from tests.serve.engine.conftest import changed
from tests.serve.engine.test_direct import direct_config
from tests.tiers.disk.accelerated import KINDS

pytestmark = pytest.mark.engine

MODELS = ["random-gqa", "random-mla"]


@pytest.fixture
def prompt(text: str) -> list[int]:
    with Engine(changed()) as engine:
        return engine.tokenizer.encode(text)[:300]


@pytest.fixture(scope="session")
def text() -> str:
    return Path(__file__).read_text() * 3


class Machine:
    """Engines that compute on the CPU, in memory that counts as an accelerator's."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake = fake = StorageFake(name)
        self.pools: list[int] = []
        monkeypatch.setenv(fake.library_variable, str(fake.path))
        monkeypatch.setenv(f"KVTIER_{fake.vendor.upper()}_LIBRARY", str(fake.path))
        monkeypatch.setattr(
            "kvtier.devices.driver_device.calibrate",
            lambda device: calibrate(device, (1024, 32768), (64,), repeats=1),
        )
        monkeypatch.setattr(
            "kvtier.serve.engine.engine.find_device", lambda name: make_device(fake)
        )
        monkeypatch.setattr("kvtier.serve.engine.profile.KVPool", self._make_pool)

    def _make_pool(
        self, group: KVGroup, num_blocks: int, device: torch.device, dtype: torch.dtype
    ) -> KVPool:
        pool = KVPool(group, num_blocks, device, dtype)
        pool.memory = replace(pool.memory, kind=KINDS[self.fake.vendor])
        self.fake.adopt(pool.memory.address, pool.memory.nbytes)
        self.pools.append(pool.memory.address)
        return pool

    @contextmanager
    def serve(self, config: EngineConfig) -> Iterator[Engine]:
        """An engine; what it used was given back when it ends."""
        with Engine(config) as engine:
            yield engine
        self.check()

    def check(self) -> None:
        for address in self.pools:
            self.fake.disown(address)
        self.pools.clear()
        assert self.fake.violations == []
        assert self.fake.storage_leaks == []
        assert self.fake.leaks == []
        assert self.fake.count("synchronous_copies") == 0, "host memory is page-locked"


@pytest.fixture
def machine(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Machine(name, monkeypatch)


def findings(engine: Engine) -> dict[str, Finding]:
    return {line.topic.partition(":")[0]: line for line in engine.call(engine.cache.findings)}


@pytest.mark.parametrize("verify", ["sampled", "off"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", STORAGE)
def test_after_a_restart_prompts_come_straight_from_disk(
    tmp_path: Path, prompt: list[int], machine: Machine, model: str, verify: str
) -> None:
    config = direct_config(tmp_path / "slab", model, disk_verify=verify)
    with machine.serve(config) as engine:
        cold = ask(engine, prompt)
    assert machine.fake.num_transfers == 0, "written by way of the ring"
    with machine.serve(config) as engine:
        warm, again = ask(engine, prompt), ask(engine, prompt)
        told = findings(engine)
    assert machine.fake.num_transfers > 0
    assert warm.hit_tokens == {DISK: 256}
    assert again.hit_tokens == {DEVICE: 256}
    assert same(cold, warm)
    assert same(cold, again)
    assert told["disk to device"].found == "direct"
    assert told["disk to accelerator"].found.startswith("GPU-direct: ")


@pytest.mark.parametrize("name", ["cufile120", "nds"])
def test_with_every_block_verified_the_same_prompts_come_by_a_buffer(
    tmp_path: Path, prompt: list[int], machine: Machine
) -> None:
    config = direct_config(tmp_path / "slab", disk_verify="always", disk_direct="auto")
    with machine.serve(config) as engine:
        cold = ask(engine, prompt)
    with machine.serve(config) as engine:
        warm = ask(engine, prompt)
        assert findings(engine)["disk to device"].found == "through a buffer"
    assert warm.hit_tokens == {DISK: 256}
    assert same(cold, warm)
    assert machine.fake.num_transfers == 0


@pytest.mark.parametrize("name", ["cufile113", "hipfile03"])
def test_beside_host_memory_it_is_read_straight(
    tmp_path: Path, prompt: list[int], machine: Machine
) -> None:
    config = direct_config(tmp_path / "slab", host_capacity="16MiB", disk_verify="off")
    with machine.serve(config) as engine:
        cold = ask(engine, prompt)
    with machine.serve(config) as engine:
        warm = ask(engine, prompt)
        engine.clear_tier(DEVICE)
        again = ask(engine, prompt)
    assert warm.hit_tokens == {DISK: 256}
    assert again.hit_tokens == {HOST: 256}, "what is on the device is stored there as ever"
    assert same(cold, warm)
    assert same(cold, again)
    assert machine.fake.num_transfers > 0


@pytest.mark.parametrize("name", ["cufile120"])
def test_damage_on_disk_is_recomputed(
    tmp_path: Path, prompt: list[int], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash nothing is trusted, so that all of it is looked at.

    Here by the request, and not by a scrub, which may well be there first.
    """
    monkeypatch.setattr(DiskTier, "facts", replace(DiskTier.facts, wants_scrubbing=False))
    config = direct_config(tmp_path / "slab", disk_verify="off")
    with machine.serve(config) as engine:
        cold = ask(engine, prompt)
        block_bytes = engine.info.bytes_per_block
    (tmp_path / "slab" / "trust").unlink()
    with (tmp_path / "slab" / "data.slab").open("r+b") as file:
        file.seek(2 * block_bytes + 100)
        file.write(b"x")
    with machine.serve(config) as engine:
        warm = ask(engine, prompt)
        assert 0 < warm.num_cached_tokens < 256
        assert same(cold, warm)
        assert machine.fake.num_transfers == 0
        engine.clear_tier(DEVICE)
        assert same(cold, ask(engine, prompt))
        assert machine.fake.num_transfers > 0, "what was found right may go directly"


@pytest.mark.parametrize("name", ["cufile120"])
def test_on_and_always_are_refused_together(tmp_path: Path, machine: Machine) -> None:
    with pytest.raises(ConfigError, match="verify: always, and the device computes no checksums"):
        Engine(direct_config(tmp_path / "slab", disk_verify="always"))
    assert machine.fake.storage_leaks == []
    assert machine.fake.count("cuFileDriverOpen") == 0
