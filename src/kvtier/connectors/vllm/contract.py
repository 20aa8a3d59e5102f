"""What kvtier relies on in vLLM, as data, and where the vLLM that is installed differs from it.

vLLM calls its offloading interface experimental: between versions methods move, take more, or go.
So everything that kvtier overrides, calls, builds or reads is written down here, and compared with
vLLM's sources, without importing them: ``kvtier doctor`` and a vLLM process can afford it.

    version     what is new in it, for kvtier
    0.27.1      the worker, the look-up results and the config of today
    0.29        a step tells the connector of loads that it waits for
    0.30        stores are queued when a step's saving ends, no longer when it is asked for results;
                requests whose load failed have a place of their own in a rank's results
    0.31        a key has a place in its request; nobody calls ``touch`` any more: a manager has to
                remember itself what a request used
    0.32        which tier a hit came from is asked for and counted
    0.33        loads within a step, which the worker is told to hurry with (``expedited``); a
                manager may have a lock
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from kvtier.errors import ConfigError

OLDEST, NEWEST = "0.32", "0.33"
"""Of the versions whose sources have all of it."""
RUN_WITH = ("0.32",)
"""Versions that the tests were run under."""


@dataclass(frozen=True, slots=True)
class Takes:
    """A method's parameters without ``self``; ``=`` behind those that have a default, or may be
    left out by one version."""

    parameters: str = ""

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(each for each in self.names if not each.endswith(("=", "**")))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each for each in self.parameters.split(", ") if each)


CONNECTOR = "distributed/kv_transfer/kv_connector"
OFFLOAD = "v1/kv_offload"

OVERRIDDEN: Mapping[str, Mapping[str, Takes]] = {
    "OffloadingManager": {
        "lookup": Takes("key, req_context"),
        "get_load_source": Takes("key, req_context"),
        "prepare_load": Takes("keys, req_context"),
        "touch": Takes("keys, req_context"),
        "complete_load": Takes("keys, req_context"),
        "prepare_store": Takes("keys, req_context"),
        "complete_store": Takes("keys, req_context, success="),
        "on_new_request": Takes("req_context"),
        "on_request_finished": Takes("req_context"),
        "take_events": Takes(),
        "on_schedule_end": Takes("context"),
        "has_pending_work": Takes(),
        "reset_cache": Takes(),
        "get_stats": Takes(),
        "shutdown": Takes(),
    },
    "OffloadingWorker": {
        "submit_store": Takes("job_id, src_spec, dst_spec"),
        "submit_load": Takes("job_id, src_spec, dst_spec, expedited="),
        "get_finished": Takes(),
        "wait": Takes("job_ids"),
        "shutdown": Takes(),
    },
    "OffloadingSpec": {
        "__init__": Takes("config"),
        "get_manager": Takes(),
        "get_worker": Takes("kv_caches"),
        "build_metric_definitions": Takes("extra_config"),
    },
    "OffloadingConnector": {
        "__init__": Takes("vllm_config, role, kv_cache_config"),
        "get_num_new_matched_tokens": Takes("request, num_computed_tokens"),
        "build_connector_meta": Takes("scheduler_output"),
        "update_connector_output": Takes("connector_output"),
        "register_kv_caches": Takes("kv_caches"),
        "start_load_kv": Takes("forward_context, **"),
        "get_transfer_results": Takes("finished_req_ids"),
        "build_connector_worker_meta": Takes(),
    },
    "OffloadingWorkerMetadata": {"aggregate": Takes("other")},
}
"""vLLM calls these, and kvtier has its own: what vLLM may pass must be known."""

CALLED: Mapping[str, Mapping[str, Takes]] = {
    "OffloadingSpecFactory": {
        "register_spec": Takes("name, module_path, class_name"),
        "get_spec_cls": Takes("extra_config"),
    },
    "KVConnectorFactory": {"register_connector": Takes("name, module_path, class_name")},
    "OffloadingConnectorWorker": {"_init_worker": Takes("kv_caches")},
    "OffloadingConnectorStats": {
        "increase_counter": Takes("counter_name, counter_increase_value, labelvalues"),
        "set_gauge": Takes("gauge_name, gauge_value, labelvalues"),
    },
    "ReqContext": {"get_offload_key_position": Takes("key")},
    "TierFilter": {"allows": Takes("medium, locality")},
    "BlockIDsLoadStoreSpec": {"__init__": Takes("block_ids")},
}
"""kvtier calls these: they must take what it passes, and want nothing more."""

BUILT: Mapping[str, tuple[str, ...]] = {
    "PrepareStoreOutput": ("keys_to_store", "store_spec", "evicted_keys"),
    "OffloadingEvent": ("keys", "medium", "removed", "locality"),
    "OffloadingMetricMetadata": ("documentation", "labelnames"),
    "TransferResult": ("job_id", "success", "transfer_size", "transfer_time"),
    "RequestOffloadingContext": (),
    "CanonicalKVCacheTensor": ("tensor", "page_size_bytes"),
    "CanonicalKVCacheRef": ("tensor_idx", "page_size_bytes"),
    "CanonicalKVCaches": ("tensors", "group_data_refs"),
}
"""kvtier makes these from the fields named, in this order."""

READ: Mapping[str, tuple[str, ...]] = {
    "OffloadingConfig": (
        "groups", "worker_kv_bytes_per_block", "extra_config", "model", "cache", "parallel",
        "kv_cache_layout", "replicated_layout", "canonical_layout",
    ),
    "OffloadingParallelConfig": (
        "rank", "world_size", "tp_size", "pp_size", "pcp_size", "dcp_size",
    ),
    "OffloadingCacheConfig": ("tokens_per_hash", "blocks_per_chunk"),
    "OffloadingGroupConfig": ("tokens_per_block", "layer_names", "group_id"),
    "OffloadingModelConfig": ("name", "dtype"),
    "OffloadingSpec": ("config", "tokens_per_block", "blocks_per_chunk", "kv_events_config"),
    "OffloadingKVEventsConfig": ("enable_kv_cache_events",),
    "OffloadingConnector": (
        "scheduler", "connector_scheduler", "connector_worker", "_connector_metadata",
    ),
    "OffloadingConnectorScheduler": ("manager",),
    "OffloadingConnectorWorker": ("worker", "spec", "kv_cache_config"),
    "KVConnectorFactory": ("_registry",),
    "KVConnectorTransferResults": ("failed_recving",),
    "CanonicalKVCaches": ("tensors", "group_data_refs"),
    "CanonicalKVCacheTensor": ("tensor",),
    "CanonicalKVCacheRef": ("tensor_idx", "page_size_bytes"),
    "GPULoadStoreSpec": ("block_ids", "group_sizes", "block_indices"),
    "OffloadingConnectorMetadata": ("load_jobs", "store_jobs", "jobs_to_flush"),
    "OffloadingWorkerMetadata": ("completed_jobs", "transfer_stats"),
    "TransferJob": ("req_id",),
    "KVConnectorOutput": ("kv_connector_worker_meta",),
    "SchedulerOutput": ("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"),
    "NewRequestData": ("req_id", "num_computed_tokens"),
    "CachedRequestData": ("req_ids", "num_computed_tokens"),
    "ReqContext": ("req_id", "load_tier_filter", "_offload_key_positions"),
    "LookupResult": ("MISS", "HIT", "HIT_PENDING", "RETRY"),
    "Medium": ("CPU", "STORAGE"),
    "Locality": ("LOCAL",),
    "CacheHitSource": ("HOST", "DISK"),
    "VllmConfig": (
        "kv_transfer_config", "model_config", "cache_config", "load_config", "speculative_config",
    ),
    "ModelConfig": ("model", "revision", "hf_config", "max_model_len"),
    "LoadConfig": ("load_format", "download_dir", "model_loader_extra_config"),
}  # fmt: skip
"""kvtier reads these fields, attributes and members."""

FILES = (
    f"{OFFLOAD}/base.py",
    f"{OFFLOAD}/config.py",
    f"{OFFLOAD}/factory.py",
    f"{CONNECTOR}/factory.py",
    f"{CONNECTOR}/v1/base.py",
    f"{CONNECTOR}/v1/offloading_connector.py",
    f"{CONNECTOR}/v1/offloading/common.py",
    f"{CONNECTOR}/v1/offloading/metrics.py",
    f"{CONNECTOR}/v1/offloading/scheduler.py",
    f"{CONNECTOR}/v1/offloading/worker.py",
    "config/load.py",
    "config/model.py",
    "config/vllm.py",
    "v1/core/sched/output.py",
    "v1/metrics/cache_hit_source.py",
    "v1/outputs.py",
)
"""Where the classes above are, inside vLLM."""


def installed() -> Path | None:
    """The folder of the vLLM that would be imported; None where there is none."""
    try:
        spec = find_spec("vllm")
    except ValueError:  # a stand-in without a spec
        return None
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) if places else None


def version_of(folder: Path) -> str:
    """vLLM's own version: its distribution has another name on each kind of device."""
    try:
        tree = ast.parse((folder / "_version.py").read_text())
    except (OSError, SyntaxError):
        return "of unknown version"
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            if names & {"__version__", "version"} and isinstance(node.value.value, str):
                return node.value.value
    return "of unknown version"


def was_run_with(version: str) -> bool:
    """Whether the tests were run under ``version``, or another patch of it."""
    return any(f"{version}.".startswith(f"{each}.") for each in RUN_WITH)


def differences(folder: Path | None = None) -> list[str]:
    """One sentence for each thing that is not as kvtier knows it; empty where all is.

    folder: of a vLLM; the one installed if None. Raises nothing for what the sources contain.
    """
    folder = folder or installed()
    if folder is None:
        return ["vLLM is not installed"]
    advice = f"use vLLM {OLDEST} to {NEWEST}, or a newer kvtier"
    return [f"vLLM {version_of(folder)}: {each}: {advice}" for each in _compare(Sources(folder))]


def require(folder: Path | None = None) -> None:
    """Raises ``ConfigError`` with all differences, where there are any."""
    if found := differences(folder):
        raise ConfigError("kvtier can't serve this vLLM:\n  " + "\n  ".join(found))


def _compare(sources: Sources) -> Iterator[str]:
    for name in dict.fromkeys((*OVERRIDDEN, *CALLED, *BUILT, *READ)):
        if name not in sources.classes:
            yield f"there is no {name} where kvtier knows it"
    for name, methods in OVERRIDDEN.items():
        if name in sources.classes:
            yield from _overridden(sources, name, methods)
    for name, methods in CALLED.items():
        for method, takes in methods.items():
            if name in sources.classes:
                yield from _called(sources, name, method, takes)
    for name, fields in BUILT.items():
        if name in sources.classes:
            found = sources.fields(name)
            wanted = [each for each, has_default in found.items() if not has_default]
            if list(found)[: len(fields)] != list(fields) or set(wanted) - set(fields):
                given = ", ".join(fields)
                yield f"{name} is made of ({_show(found)}); kvtier gives it ({given})"
    for name, attributes in READ.items():
        if name in sources.classes:
            missing = [each for each in attributes if each not in sources.attributes(name)]
            if missing:
                yield f"{name} has no {', '.join(missing)}"


def _overridden(sources: Sources, name: str, methods: Mapping[str, Takes]) -> Iterator[str]:
    for method, takes in methods.items():
        found = sources.parameters(name, method)
        if found is None:
            yield f"{name} has no {method}"
            continue
        known = [each.rstrip("=") for each in takes.names]
        required = [each.rstrip("=") for each in takes.required]
        # In the same order, nothing unknown, and nothing left out that kvtier counts on.
        if list(found) != known[: len(found)] or len(found) < len(required):
            yield f"{name}.{method} takes ({_show(found)}); kvtier knows ({takes.parameters})"
    for method in sources.unfinished(name):
        if method not in methods:
            yield f"{name} wants {method}, which kvtier has not"


def _called(sources: Sources, name: str, method: str, takes: Takes) -> Iterator[str]:
    found = sources.parameters(name, method)
    if found is None:
        yield f"{name} has no {method}"
        return
    wanted = [each for each, has_default in found.items() if not has_default]
    if list(found)[: len(takes.names)] != list(takes.names) or set(wanted) - set(takes.names):
        yield f"{name}.{method} takes ({_show(found)}); kvtier gives it ({takes.parameters})"


def _show(parameters: Mapping[str, bool]) -> str:
    return ", ".join(f"{name}=" if default else name for name, default in parameters.items())


@dataclass(frozen=True)
class Sources:
    """vLLM's classes, as they are written."""

    folder: Path

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """By name. A file that is missing or can't be read has none."""
        found: dict[str, ast.ClassDef] = {}
        for file in FILES:
            try:
                body = ast.parse((self.folder / file).read_text()).body
            except (OSError, SyntaxError):
                continue
            found.update((node.name, node) for node in body if isinstance(node, ast.ClassDef))
        return found

    def family(self, name: str) -> list[ast.ClassDef]:
        """A class, and those of its bases that are known here, nearest first."""
        node = self.classes.get(name)
        if node is None:
            return []
        bases = (base.id for base in node.bases if isinstance(base, ast.Name))
        return [node, *(each for base in bases for each in self.family(base))]

    def functions(self, name: str) -> Iterator[ast.FunctionDef]:
        """Methods and properties, nearest first."""
        for node in self.family(name):
            yield from (each for each in node.body if isinstance(each, ast.FunctionDef))

    def parameters(self, name: str, method: str) -> dict[str, bool] | None:
        """What a method takes, without ``self``, and whether it has a default; ``**`` if it takes
        any. None where there is no such method."""
        for function in self.functions(name):
            if function.name == method:
                given = function.args
                names = [each.arg for each in (*given.posonlyargs, *given.args)][1:]
                num_required = len(names) - len(given.defaults)
                found = {each: place >= num_required for place, each in enumerate(names)}
                for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
                    found[each.arg] = default is not None
                return found | ({"**": False} if given.kwarg else {})
        return None

    def unfinished(self, name: str) -> list[str]:
        """Methods that a subclass has to bring."""
        nearest: dict[str, ast.FunctionDef] = {}
        for function in self.functions(name):
            nearest.setdefault(function.name, function)
        return [
            each.name
            for each in nearest.values()
            if any("abstract" in ast.unparse(mark) for mark in each.decorator_list)
        ]

    def fields(self, name: str) -> dict[str, bool]:
        """A dataclass's fields in their order, and whether each has a default."""
        found: dict[str, bool] = {}
        for node in reversed(self.family(name)):
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    written = ast.unparse(each)
                    if "ClassVar" not in written and "init=False" not in written:
                        found[each.target.id] = each.value is not None
        return found

    def attributes(self, name: str) -> set[str]:
        """Fields, members, properties, and what ``__init__`` sets."""
        found: set[str] = set()
        for node in self.family(name):
            for each in ast.walk(node):
                if isinstance(each, ast.FunctionDef):
                    found.add(each.name)
                elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                    found.add(each.attr)
                elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                    found.add(each.id)
        return found
