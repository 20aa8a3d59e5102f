"""Real SGLang servers on the CPU, and requests to them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

import kvtier
from tests.kit.servers import free_port
from tests.kit.waiting import wait_until

MODEL = Path(kvtier.__file__).parent / "serve/engine/builtin/kvtier-tiny"
STAND_INS = Path(__file__).parent / "stand_ins"
REPOSITORY = Path(__file__).parents[3]
PAGE = int(os.environ.get("KVTIER_TEST_PAGE", "64"))
"""Tokens. SGLang 0.5.17 and older have no allocator of longer pages on a CPU."""
START_S = 600
ANSWER_S = 120
DEVICE = os.environ.get("KVTIER_TEST_DEVICE", "cpu")
"""Device, by SGLang's name."""
ON_CPU = (
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--mem-fraction-static", "0.3"),
    *("--disable-overlap-schedule", "--disable-cuda-graph"),
)
OPTIONS = (
    *("--device", DEVICE, "--dtype", "float32", "--host", "127.0.0.1"),
    *("--page-size", str(PAGE), "--max-total-tokens", "8192"),
    *("--enable-cache-report", "--skip-server-warmup"),
    *(ON_CPU if DEVICE == "cpu" else ()),
)
LONG = 20 * PAGE + 30
"""Tokens of a prompt: its last page is not full."""
NUM_WHOLE = (LONG - 1) // PAGE * PAGE
"""Tokens of it that a hit may have: one is always computed."""
HIERARCHICAL = ("--enable-hierarchical-cache", "--hicache-ratio", "1.5")


def storage(
    folder: Path | None, capacity: str = "256MiB", waits: str = "wait_complete", **settings: object
) -> tuple[str, ...]:
    """Return the options of ``kvtier sglang-args`` for a storage back end.

    folder: folder of the disk tier; None without a disk. waits: SGLang's prefetch policy.
    """
    extra = {
        "backend_name": "kvtier",
        "module_path": "kvtier.connectors.sglang.entry",
        "class_name": "KvtierStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "prefetch_threshold": PAGE,
        "load_policy": "always",
        **settings,
    }
    if folder is not None:
        extra |= {"disk_path": str(folder), "disk_capacity": capacity}
    name = "--hicache-storage-backend"
    return (
        *HIERARCHICAL,
        *(name, "dynamic", f"{name}-extra-config", json.dumps(extra)),
        *("--hicache-storage-prefetch-policy", waits),
    )


def linker(folder: Path | None, capacity: str = "256MiB", **settings: object) -> tuple[str, ...]:
    """Return the options of ``kvtier sglang-args`` for the linker.

    The linker replaces SGLang's host memory.

    folder: folder of the disk tier; None for host memory only. capacity: of each tier.
    """
    extra: dict[str, object] = {"host_capacity": capacity, "load_policy": "always"}
    if folder is not None:
        extra |= {"disk_path": str(folder), "disk_capacity": capacity}
    config = {
        "linker": "KvtierLinker",
        "linker_module_path": "kvtier.connectors.sglang.entry",
        "linker_extra_config": extra | settings,
    }
    name = "--unified-cache-external-linker"
    return (
        "--enable-unified-cache-external-linker",
        *(f"{name}-backend", "dynamic", f"{name}-config", json.dumps(config)),
    )


FRONTS: dict[str, Callable[..., tuple[str, ...]]] = {"storage": storage, "linker": linker}
"""kvtier's connectors for SGLang: the options of a server with each."""


@dataclass(frozen=True)
class Answer:
    """Answer of a server.

    tokens: generated tokens.

    logprobs: log-probabilities of these, and of the likeliest tokens in each step.

    num_cached: tokens of the prompt that were not computed. num_stored: those of them from storage.
    """

    tokens: list[int]
    logprobs: list[Any]
    num_cached: int
    num_stored: int


class Server:
    """A running server. log: file of its output."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.log = log
        self._url = f"http://127.0.0.1:{port}"

    def ask(
        self,
        prompt: Sequence[int],
        num_tokens: int = 8,
        salt: str | None = None,
        hints: object = None,
    ) -> Answer:
        """Return the answer to a prompt. hints: an orchestrator's ``kv_hints``."""
        sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        body: Any = {
            "input_ids": list(prompt),
            "sampling_params": sampling,
            "return_logprob": True,
            "top_logprobs_num": 5,
            "cache_salt": salt,
            "kv_hints": hints,
        }
        answer = requests.post(f"{self._url}/generate", json=body, timeout=ANSWER_S)
        answer.raise_for_status()
        found = answer.json()
        about = found["meta_info"]
        details = about.get("cached_tokens_details") or {}
        return Answer(
            found["output_ids"],
            [about["output_token_logprobs"], about["output_top_logprobs"]],
            about["cached_tokens"],
            details.get("storage", 0),
        )

    def metrics(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Return the labels and values of a metric."""
        text = requests.get(f"{self._url}/metrics", timeout=ANSWER_S).text
        samples = (it for family in text_string_to_metric_families(text) for it in family.samples)
        return [(sample.labels, sample.value) for sample in samples if sample.name == name]

    def flush(self) -> None:
        """Empty device and host memory; storage stays."""
        url = f"{self._url}/flush_cache"
        requests.post(url, params={"timeout": 30}, timeout=ANSWER_S).raise_for_status()

    def update_weights(self, model: Path, flush_cache: bool = True) -> None:
        """Replace the weights in place by those of a folder."""
        body: dict[str, str | bool] = {"model_path": str(model), "flush_cache": flush_cache}
        url = f"{self._url}/update_weights_from_disk"
        answer = requests.post(url, json=body, timeout=ANSWER_S)
        assert answer.json()["success"], answer.text

    def wait(self) -> None:
        """Wait until the server answers."""

        def answers() -> bool:
            if self.process.poll() is not None:
                pytest.fail(f"the server has ended:\n{self.text[-6000:]}")
            with suppress(requests.ConnectionError):
                return requests.get(f"{self._url}/health", timeout=ANSWER_S).ok
            return False

        wait_until(answers, "the server answers", START_S)

    def settle(self, folder: Path, num_pages: int) -> None:
        """Wait until the slabs have acknowledged ``num_pages`` pages, by their journals' sizes."""

        def are_stored() -> bool:
            sizes = (path.stat().st_size for path in folder.rglob("journal"))
            return sum(sizes) >= 64 * num_pages

        wait_until(are_stored, f"{num_pages} pages are stored; see {self.log}")

    def kill(self) -> None:
        """Kill all processes of the server at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")


@contextmanager
def server(
    log: Path,
    *options: str,
    model: Path = MODEL,
    num_ranks: int = 1,
    python: str = sys.executable,
    **environment: str,
) -> Iterator[Server]:
    """Run a server in processes of its own.

    num_ranks: its tensor parallel size; each rank computes on a core of its own.
    python: interpreter of the server.
    """
    port = free_port()
    command = [python, "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--tp-size", str(num_ranks)]
    given = {"HF_HUB_OFFLINE": "1", **environment}
    if DEVICE == "cpu":
        given |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(num_ranks))),
            "PYTHONPATH": os.pathsep.join([str(STAND_INS), str(REPOSITORY), *_path()]),
        }
    with log.open("ab") as file:
        process = subprocess.Popen(
            [*command, "--port", str(port), *OPTIONS, *options],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **given},
            start_new_session=True,
        )
        made = Server(process, port, log)
        try:
            made.wait()
            yield made
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with suppress(ProcessLookupError):  # the rest of its processes
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)


def _path() -> list[str]:
    """Return the folders in which this process finds packages, beside its own."""
    return [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]


def prompt(seed: int, num_tokens: int) -> list[int]:
    """Return tokens whose first one is unique to the seed."""
    rng = random.Random(seed)
    return [rng.randrange(10, 4000) for _ in range(num_tokens)]
