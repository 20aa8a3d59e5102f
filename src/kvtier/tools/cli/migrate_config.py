"""``kvtier migrate-config``: translate the configuration of another KV cache into kvtier's."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvtier.core.config import variable_of
from kvtier.core.errors import ConfigError

GIB: Final = 1 << 30
KEPT: Final = (
    "NixlConnector",
    "MooncakeConnector",
    "P2pNcclConnector",
    "MoRIIOConnector",
    "DecodeBenchConnector",
)
"""Connectors of vLLM that move KV between servers: kvtier stands beside them."""
MODES: Final = {"kv_producer": "save_only", "kv_consumer": "load_only"}
SCHEMES: Final = {
    "mooncakestore": "mooncake",
    **{each: each for each in ("redis", "rediss", "valkey", "s3", "mooncake")},
}
"""Kinds of stores in LMCache's ``remote_url``, and kvtier's for the same store."""
NOT_KVTIERS: Final = {
    "(chunk_size|save_unfull_chunk)": "a block is vLLM's own; only whole blocks are stored",
    "(enable_blending|blend_.*)": "KV is reused for equal prefixes only, where it is exact",
    "(enable_p2p|p2p_.*)": "servers share KV by a store or a node: storage, node",
    "(enable_controller|controller_.*|lmcache_.*)": "there is no controller",
    r"mp[._].*": "there is no daemon; what its --l1-size-gb says is host_capacity",
    "(enable_pd|pd_.*|nixl_.*|transfer_channel)": "keep NixlConnector beside kvtier, in a "
    "MultiConnector",
    "(use_layerwise|enable_async_loading|use_gpu_connector.*)": "loads never block the engine",
    "(pre_caching_hash_algorithm|hash_.*)": "vLLM's own hashes are used",
    "(lookup_timeout_ms|blocking_timeout_secs)": "waits are bounded by lookup_deadline_s",
    "(min_retrieve_tokens|store_threshold|max_tracker_size)": "it is decided by what loading saves",
    "(internal_api_server_.*|.*_port.*|.*_host)": "metrics are those of the engine's own port",
    "(n_read_threads|n_write_threads|disk_buffer_slots|use_page_cache|io_direct)": "the disk "
    "engine chooses by itself",
    "(lazy_offload|kv_offload_backend|backpressure)": "blocks are stored once they are computed",
    "(metadata_server|local_hostname)": "Mooncake's client needs none",
    "(local_buffer_size|global_segment_size)": "options in the URL of the store set it: "
    "local_buffer_bytes, segment_bytes",
}
"""Names without counterpart, as patterns, and why."""


@dataclass
class Translation:
    """Settings of kvtier, and what was left out.

    settings: kvtier's, by name. notes: sentences on what differs. ranks: number of ranks, since
    LMCache's sizes are those of one.
    """

    ranks: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def note(self, name: str, why: str) -> None:
        self.notes.append(f"{name}: {why}")

    def each(self, given: Mapping[str, Any]) -> None:
        """Translate settings, by the names that others give them."""
        for key, value in given.items():
            name = key.removeprefix("lmcache.")
            if value is None or name in IGNORED:
                continue
            if name in COUNTERPARTS:
                COUNTERPARTS[name](self, name, value)
            elif value:  # a switch that is off asks for nothing
                whys = [why for names, why in NOT_KVTIERS.items() if re.fullmatch(names, name)]
                self.note(name, next(iter(whys), "kvtier has nothing like it"))


def _size(setting: str, unit: int, *, is_per_rank: bool = False) -> Callable[..., None]:
    def translate(to: Translation, name: str, value: Any) -> None:
        try:
            num_bytes = int(float(value) * unit) * (to.ranks if is_per_rank else 1)
        except (TypeError, ValueError):
            raise ConfigError(f"{name} can't be {value!r}; write a number") from None
        if not num_bytes:
            return
        is_whole = num_bytes % (1 << 20) == 0
        to.settings[setting] = f"{num_bytes / GIB:g}GiB" if is_whole else num_bytes
        if is_per_rank and to.ranks == 1:
            to.note(name, f"it is for each rank, {setting} for all together; see --ranks")

    return translate


def _same(setting: str) -> Callable[..., None]:
    return lambda to, _, value: to.settings.__setitem__(setting, value)


def _folder(to: Translation, name: str, value: Any) -> None:
    if isinstance(value, str) and value.lower() not in ("true", "false", ""):
        paths = [part.removeprefix("file://").strip() for part in value.split(",")]
        to.settings["disk_path"] = paths[0] if len(paths) == 1 else [path for path in paths if path]
    elif str(value).lower() == "true":
        to.note(name, "name a folder in disk_path")
    if name == "gds_path":
        to.settings["disk_direct"] = "auto"
    if name == "storage_backends":
        to.note(name, 'for a folder that machines share, set storage: "dir:///folder" instead')


def _remote(to: Translation, name: str, value: Any) -> None:
    scheme, _, rest = str(value).partition("://")
    if scheme in SCHEMES:
        to.settings["storage"] = f"{SCHEMES[scheme]}://{rest}"
    else:
        from kvtier.tiers.row import STORES

        kinds = "://, ".join(sorted(STORES))
        to.note(name, f"kvtier has no store of the kind {scheme!r}; it has {kinds}://")


def _policy(to: Translation, name: str, value: Any) -> None:
    known = {"lru": "lru", "arc": "arc", "lfu": "lfuda"}.get(str(value).lower())
    if known in (None, "lru"):
        to.note(name, f"{value} is replaced by kvtier's own policy, which learns what is reused")
    else:
        to.settings["eviction_policy"] = known


def _serde(to: Translation, name: str, value: Any) -> None:
    if value != "naive":
        to.settings["codec"] = "lossless"
        to.note(name, f"{value} changes the KV; codec lossless makes it smaller, with equal bits")


def _generated(to: Translation, _: str, value: Any) -> None:
    if value:
        to.settings["offload_prompt_only"] = False


def _tiers(to: Translation, name: str, value: Any) -> None:
    for tier in value:
        settings = {key: part for key, part in tier.items() if key != "type"}
        if tier.get("type") == "fs":
            to.each(settings)
        else:
            to.note(name, f"{tier.get('type')} has no counterpart; storage names a store instead")


def _mooncake(to: Translation, _: str, value: Any) -> None:
    to.settings["storage"] = f"mooncake://{value}"


def _option(option: str) -> Callable[..., None]:
    def translate(to: Translation, name: str, value: Any) -> None:
        if value and value != "tcp":
            to.note(name, f"add {option}={value} to the URL of the store")

    return translate


def _inside(to: Translation, _: str, value: Any) -> None:
    for connector in value:
        to.each(connector.get("ucm_connector_config") or {})


COUNTERPARTS: Final[Mapping[str, Callable[..., None]]] = {
    "max_local_cpu_size": _size("host_capacity", GIB, is_per_rank=True),
    "max_local_disk_size": _size("disk_capacity", GIB, is_per_rank=True),
    "local_disk": _folder,
    "gds_path": _folder,
    "remote_url": _remote,
    "remote_serde": _serde,
    "cache_policy": _policy,
    "save_decode_cache": lambda to, _, value: to.settings.update(
        {"offload_prompt_only": False} if value else {}
    ),
    "cpu_bytes_to_use": _size("host_capacity", 1),
    "cpu_bytes_to_use_per_rank": _size("host_capacity", 1, is_per_rank=True),
    "disk_path": _folder,
    "disk_capacity_bytes": _size("disk_capacity", 1),
    "eviction_policy": _policy,
    "secondary_tiers": _tiers,
    "root_dir": _folder,
    **{
        name: _same(name)
        for name in (
            "block_size",
            "blocks_per_chunk",
            "offload_prompt_only",
            "self_describing_kv_events",
        )
    },
    "master_server_address": _mooncake,
    "protocol": _option("protocol"),
    "device_name": _option("device"),
    "ucm_connectors": _inside,
    "storage_backends": _folder,
}
"""By the name that LMCache, vLLM, Mooncake or UCM gives a setting: its translation."""
IGNORED: Final = ("local_cpu", "spec_name", "ucm_connector_name", "local_disk_path_sharding")
"""Names that say what follows from others anyway."""


def read(text: str) -> dict[str, Any]:
    """Return the settings in a file: JSON, ``LMCACHE_...`` lines of an environment, or YAML."""
    variable = re.compile(r"^\s*(?:export\s+)?LMCACHE_(\w+)=(.*)$", re.MULTILINE)
    if found := variable.findall(text):
        words = {name.lower(): " ".join(shlex.split(value)) for name, value in found}
        switch = {"true": True, "false": False}
        return {name: switch.get(value.lower(), value) for name, value in words.items()}
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError(
            "PyYAML, which vLLM and SGLang bring, is missing: pip install pyyaml"
        ) from None
    try:
        given = yaml.safe_load(text)  # JSON is YAML, too
    except yaml.YAMLError as error:
        raise ConfigError(f"neither YAML nor JSON: {' '.join(str(error).split())}") from None
    if not isinstance(given, dict) or not given:
        raise ConfigError(
            "no settings in it; give an LMCache or UCM YAML, LMCACHE_... lines, Mooncake's JSON, "
            "or the value of --kv-transfer-config"
        )
    return given


def translate_connectors(given: Mapping[str, Any], to: Translation) -> list[Mapping[str, Any]]:
    """Translate a ``--kv-transfer-config``. Return the connectors that stay beside kvtier."""
    name, extra = given["kv_connector"], given.get("kv_connector_extra_config") or {}
    if name == "MultiConnector":
        return [
            kept
            for inside in extra.get("connectors") or ()
            for kept in translate_connectors(inside, to)
        ]
    if name in KEPT:
        return [given]
    if mode := MODES.get(given.get("kv_role", "")):
        to.settings["mode"] = mode
    to.note(name, "kvtier takes its place")
    if name in ("MooncakeStoreConnector", "UCMConnector", "AscendStoreConnector"):
        to.note(name, "its settings are in a file of their own, which this command reads, too")
    to.each(extra)
    return []


def migrate_config(
    file: Annotated[
        Path,
        typer.Argument(
            help="LMCache's or UCM's YAML, a file of LMCACHE_... variables, Mooncake's JSON, or "
            "the value of vLLM's --kv-transfer-config; - for standard input."
        ),
    ],
    ranks: Annotated[
        int, typer.Option(min=1, help="Ranks of the engine: LMCache's sizes are for each of them.")
    ] = 1,
) -> None:
    """Translate another cache's configuration into kvtier's, and name what has no counterpart.

    Standard output has vLLM's option, standard error the same as variables, and the notes.
    """
    from kvtier.connectors.vllm.shared.fronts import front_named, transfer_config

    text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    given, to, kept = read(text), Translation(ranks), []
    if "kv_connector" in given:
        kept = translate_connectors(given, to)
    else:
        to.each(given)
    if "disk_capacity" in to.settings and "disk_path" not in to.settings:
        to.note("disk_capacity", "there is no folder for it, so it is left out")
        del to.settings["disk_capacity"]
    config = transfer_config(front_named("auto"), to.settings)
    if kept:
        buffers = {key: one[key] for one in kept for key in one if key == "kv_buffer_device"}
        inside = {"connectors": [*kept, config]}
        config = {"kv_connector": "MultiConnector", "kv_role": "kv_both", **buffers}
        config["kv_connector_extra_config"] = inside
    typer.echo(f"--kv-transfer-config {shlex.quote(json.dumps(config, separators=(',', ':')))}")
    if not kept and (line := _as_variables(to.settings)):
        typer.echo(f"or in the environment of vLLM or SGLang:\n{line}", err=True)
    for sentence in to.notes:
        typer.echo(sentence, err=True)


def _as_variables(settings: Mapping[str, Any]) -> str:
    """Return settings as assignments of a shell; "" if one of them is vLLM's own."""
    from kvtier.connectors.vllm.shared.settings import VllmSettings

    if VllmSettings.own & settings.keys() or not settings:
        return ""
    words = [
        (variable_of(name), " ".join(value) if isinstance(value, list) else str(value))
        for name, value in settings.items()
    ]
    return " ".join(f"{variable}={shlex.quote(word)}" for variable, word in words)
