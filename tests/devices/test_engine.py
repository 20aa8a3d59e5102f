"""The embedded engine on fake accelerators: equal logits, whatever path its KV came by."""

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
from kvtier.serve.engine import Engine, EngineConfig, Tokenizer
from kvtier.serve.engine.model_names import BUILTIN
from kvtier.serve.engine.pool import KVPool
from kvtier.tiers.disk.tier import DiskTier
from tests.devices.drivers import make_device
from tests.kit.fakes.fake import Fake
from tests.kit.fakes.storage import STORAGE, StorageFake
from tests.serve.engine.asking import ask, same
from tests.serve.engine.conftest import SMALL
from tests.serve.engine.test_disk import direct_config
from tests.tiers.disk.accelerated import KINDS

pytestmark = pytest.mark.engine

MODELS = ["random-gqa", "random-mla"]


@pytest.fixture(scope="session")
def prompt() -> list[int]:
    return Tokenizer(BUILTIN / "kvtier-tiny").encode(Path(__file__).read_text())[:300]


class Machine:
    """Engines that compute on the CPU, in memory that counts as an accelerator's."""

    def __init__(self, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake = fake
        self.pools: list[int] = []
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
        assert self.fake.leaks == []
        assert self.fake.count("synchronous_copies") == 0, "host memory is page-locked"


class MachineWithDisk(Machine):
    """A machine whose accelerator reads files itself."""

    fake: StorageFake

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(StorageFake(name), monkeypatch)
        monkeypatch.setenv(self.fake.library_variable, str(self.fake.path))

    def check(self) -> None:
        assert self.fake.storage_leaks == []
        super().check()


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def machine(name: str, monkeypatch: pytest.MonkeyPatch) -> MachineWithDisk:
    return MachineWithDisk(name, monkeypatch)


def findings(engine: Engine) -> dict[str, Finding]:
    return {line.topic.partition(":")[0]: line for line in engine.call(engine.cache.findings)}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("variant", ["cuda130", "cann83", "cann91"])
def test_kv_from_the_host_tier_gives_equal_logits(
    variant: str, model: str, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.cache.transfer.staging.STEP_BYTES", 1)
    fake = Fake(variant)
    fake.reset(seed=3, late_reads=True, max_delay_us=50)
    prompts = [prompt, prompt[::-1]]
    with Machine(fake, monkeypatch).serve(replace(SMALL, model=model)) as engine:
        cold = [ask(engine, each) for each in prompts]
        for each, before in zip(prompts, cold, strict=True):
            engine.clear_tier(DEVICE)
            warm = ask(engine, each)
            assert warm.hit_tokens == {HOST: 288}
            assert same(before, warm)
        fake.fail_late(code=700)
        engine.clear_tier(DEVICE)
        assert same(cold[0], ask(engine, prompt)), "what did not arrive is computed"


# -- a disk in place of host memory, or beside it --------------------------------------------------


@pytest.mark.parametrize("verify", ["sampled", "off"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", STORAGE)
def test_after_a_restart_prompts_come_straight_from_disk(
    tmp_path: Path, prompt: list[int], machine: MachineWithDisk, model: str, verify: str
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
    tmp_path: Path, prompt: list[int], machine: MachineWithDisk
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
    tmp_path: Path, prompt: list[int], machine: MachineWithDisk
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
    tmp_path: Path, prompt: list[int], machine: MachineWithDisk, monkeypatch: pytest.MonkeyPatch
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
def test_on_and_always_are_refused_together(tmp_path: Path, machine: MachineWithDisk) -> None:
    with pytest.raises(ConfigError, match="verify: always, and the device computes no checksums"):
        Engine(direct_config(tmp_path / "slab", disk_verify="always"))
    assert machine.fake.storage_leaks == []
    assert machine.fake.count("cuFileDriverOpen") == 0
