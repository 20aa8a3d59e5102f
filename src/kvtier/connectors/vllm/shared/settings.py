"""Settings in ``kv_connector_extra_config``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvtier.connectors.common.settings import HostSettings
from kvtier.core.config import SIZE, StageConfig, setting
from kvtier.core.types import Direct

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig


@dataclass(frozen=True)
class VllmSettings(HostSettings, StageConfig):
    """Ours, beside those of the OffloadingConnector itself."""

    option: ClassVar[str] = "kv_connector_extra_config"
    own: ClassVar[frozenset[str]] = frozenset(
        {
            "spec_name",
            "spec_module_path",
            "block_size",
            "blocks_per_chunk",
            "offload_prompt_only",
            "self_describing_kv_events",
        }
    )

    disk_bytes_per_s: str | int = setting(
        0,
        "Bytes read, and bytes written, per second by all ranks together; 0 for no limit. For "
        "disks that other programs use, too.",
        advice=SIZE,
    )
    disk_direct: Direct = setting(
        Direct.OFF,
        "Route of KV from disk: auto reads through host memory, and directly to vLLM's pages while "
        "host memory has no room; on reads directly; off reads through host memory. A direct read "
        "cannot be cancelled: if the disk hangs, its request waits.",
    )
    node_deadline_s: float = setting(
        0.005,
        "Longest wait for an answer of the node, in seconds, on the scheduler's thread, and 2 us "
        "more per block. Without one the prompt is computed. The ranks copy from and to the node's "
        "memory themselves, so host_capacity does not count.",
    )

    grid: int = setting(
        0,
        "Compute, cache and reuse prompts in pieces of so many tokens: a hit has the bits of a "
        "miss. 0 for off. Needs kvtier's --scheduler-cls.",
    )
    recompute_failed_loads: bool = setting(
        True,
        "Whether vLLM computes what a connector could not load, kvtier or another one beside it. "
        "false leaves vLLM's kv_load_failure_policy as it is; by default it fails the request.",
    )

    def __post_init__(self) -> None:
        HostSettings.__post_init__(self)
        if self.storage_stages < 0:
            raise self.wrong(f"storage_stages: {self.storage_stages} is below 0")
        if self.storage_stages and not self.storage_shards:
            raise self.wrong("storage_stages needs storage_shards; write 1 to cut layers only")
        if self.grid < 0:
            raise self.wrong(f"grid: {self.grid} is below 0")
        if self.node_deadline_s <= 0:
            raise self.wrong(f"node_deadline_s: {self.node_deadline_s!r} is not above 0")

    @property
    def bytes_per_s(self) -> int:
        return self.size("disk_bytes_per_s")


def set_failure_policy(config: KVTransferConfig) -> None:
    """Have vLLM compute what could not be loaded, unless kvtier never loads or is not to ask.

    vLLM's scheduler has one policy for all connectors, and by default fails the request. Inside a
    MultiConnector ``config`` is a copy: see ``RecomputingMulti``.
    """
    settings = VllmSettings.read(config.kv_connector_extra_config)
    if settings.mode.loads and settings.recompute_failed_loads:
        config.kv_load_failure_policy = "recompute"
