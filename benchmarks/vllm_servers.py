"""vLLM's own server in a process, with or without something under it, and requests to it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers import ENVIRONMENTS
from benchmarks.vllm_protocol import (
    Answer,
    Process,
    cpu_s_of,
    family_of,
    last_error,
    read_answer,
    read_counters,
    running_processes,
)

VLLM, OURS, LMCACHE = "vLLM", "vLLM + kvtier", "vLLM + LMCache"
ENDLESS, ON_DISK = "vLLM, endless pool", "vLLM + kvtier, mostly on disk"
BLOCK = 128
"""vLLM's block size on the CPU, in tokens."""
SERVED_AS = "model"
LOOPBACK = "127.0.0.1"
START_S = 300.0
STOP_S = 20.0
PAUSE_S = 0.1
QUIET_S = 5.0
IDLE = 0.2
"""Of a core: a server that takes less is quiet."""
REQUEST_S = 300.0

JSON_BODY = {"Content-Type": "application/json"}
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "WARNING",
    "PYTHONHASHSEED": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "THP_MEM_ALLOC_ENABLE": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""No messages to anybody; small pools; hashes that are the same in every process; weights in huge
pages, or two servers of a kind would differ by which small ones they got."""


def compute_cores() -> str:
    """Where vLLM computes, for ``VLLM_CPU_OMP_THREADS_BIND``: all cores but the last.

    By itself vLLM keeps one core more free where it has a connector; on two cores it takes both
    then, and the contestants would not compute with equally many threads.
    """
    cores = sorted(os.sched_getaffinity(0))
    return ",".join(map(str, cores[:-1] or cores))


@dataclass(frozen=True, slots=True)
class Contestant:
    """A vLLM, and what is under it. connector: its ``--kv-transfer-config``. environment: whose
    interpreter, a folder of ``make peers``. device_blocks: of its pool, where that differs."""

    name: str
    environment: str = "vllm"
    device_blocks: int | None = None
    connector: dict[str, object] | None = None
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        return ENVIRONMENTS / self.environment / "bin" / "python"


def vllm_alone() -> Contestant:
    return Contestant(VLLM, variables={"VLLM_PLUGINS": ""})


def vllm_endless(num_blocks: int) -> Contestant:
    """vLLM alone with a pool that never evicts: what no cache can do better."""
    return Contestant(ENDLESS, device_blocks=num_blocks, variables={"VLLM_PLUGINS": ""})


def with_kvtier(host: str, name: str = OURS, **settings: object) -> Contestant:
    """As ``kvtier vllm-args`` says it. settings: more of ``kv_connector_extra_config``."""
    extra = {"spec_name": "kvtier", "host_capacity": host, **settings}
    return Contestant(
        name,
        connector={
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        },
    )


def with_lmcache(host_gib: float) -> Contestant:
    """LMCache's server beside vLLM, which vLLM starts: inside of vLLM it knows no CPU."""
    size = f"--l1-size-gb {host_gib:g} --eviction-policy LRU --chunk-size {BLOCK}"
    return Contestant(
        LMCACHE,
        environment="vllm-lmcache",
        connector={
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": f"tcp://{LOOPBACK}",
                "lmcache.mp.port": free_port(),
                "lmcache.mp.autostart": True,
                "lmcache.mp.autostart.server_args": (
                    f"{size} --supported-transfer-mode auto --disable-observability"
                ),
            },
        },
        variables={"VLLM_PLUGINS": ""},
    )


def free_port() -> int:
    """One that nobody listens on at the moment."""
    with socket.socket() as found:
        found.bind((LOOPBACK, 0))
        return int(found.getsockname()[1])


class Server:
    """A contestant that answers on a loopback port. Close it."""

    def __init__(
        self,
        contestant: Contestant,
        model: Path,
        folder: Path,
        device_blocks: int,
        max_tokens: int = 4096,
    ) -> None:
        self.contestant = contestant
        self.port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "log"
        arguments: dict[str, object] = {
            "--model": model,
            "--served-model-name": SERVED_AS,
            "--host": LOOPBACK,
            "--port": self.port,
            "--dtype": "float32",
            "--block-size": BLOCK,
            "--num-gpu-blocks-override": contestant.device_blocks or device_blocks,
            "--max-model-len": max_tokens,
            "--max-num-seqs": 16,
            "--generation-config": "vllm",
            "--override-generation-config": json.dumps({"temperature": 0.0}),
            "--disable-uvicorn-access-log": None,
            "--enforce-eager": None,
            "--enable-prefix-caching": None,
            "--enable-prompt-tokens-details": None,
        }
        if contestant.connector is not None:
            arguments["--kv-transfer-config"] = json.dumps(contestant.connector)
        words = [str(word) for pair in arguments.items() for word in pair if word is not None]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [contestant.python, "-m", "vllm.entrypoints.openai.api_server", *words],
                cwd=folder,
                env={
                    **os.environ,
                    **QUIET,
                    "VLLM_CPU_OMP_THREADS_BIND": compute_cores(),
                    **contestant.variables,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def wait(self) -> None:
        """Until it answers. RuntimeError with the reason where it ended instead."""
        give_up = time.monotonic() + START_S
        while time.monotonic() < give_up:
            if self._process.poll() is not None:
                raise RuntimeError(last_error(self._log.read_text(errors="replace")))
            with suppress(OSError, http.client.HTTPException):
                if self._request("GET", "/health")[0] == 200:
                    return
            time.sleep(0.5)
        raise RuntimeError(f"no answer within {START_S:.0f} s")

    def ask(self, prompt: Sequence[int], max_tokens: int, logprobs: int | None = None) -> Answer:
        """Complete a prompt of token ids, greedily. RuntimeError where tokens are missing."""
        body: dict[str, object] = {
            "model": SERVED_AS,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if logprobs is not None:
            body["logprobs"] = logprobs
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=REQUEST_S)
        with closing(connection):
            data = json.dumps(body).encode()
            begin = time.perf_counter()
            connection.request("POST", "/v1/completions", data, JSON_BODY)
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{self.contestant.name}: {response.read().decode()[:300]}")
            first = end = 0.0
            events = []
            for line in response:
                if line.startswith(b"data: {"):
                    end = time.perf_counter()
                    first = first or end
                    events.append(json.loads(line[6:]))
        answer = read_answer(events, 1000 * (first - begin), 1000 * (end - begin))
        if answer.num_tokens != max_tokens:
            raise RuntimeError(
                f"{self.contestant.name}: {answer.num_tokens} of {max_tokens} tokens came"
            )
        return answer

    def reset(self, with_tiers: bool = False) -> None:
        """Empty vLLM's own prefix cache, and what is under it where that is asked for."""
        path = "/reset_prefix_cache" + "?reset_external=true" * with_tiers
        status, text = self._request("POST", path)
        if status != 200:
            raise RuntimeError(f"{self.contestant.name}: {path}: {status} {text[:300]}")

    def settle(self) -> None:
        """Until it is quiet. A worker of vLLM's goes on looking for work for a second after its
        last step, on the core on which the next contestant would compute."""
        give_up = time.monotonic() + QUIET_S
        before = self.cpu_s()
        while time.monotonic() < give_up:
            time.sleep(PAUSE_S)
            now = self.cpu_s()
            if now - before <= IDLE * PAUSE_S:
                return
            before = now

    def counters(self) -> dict[str, float]:
        """vLLM's metrics, summed over their labels."""
        return read_counters(self._request("GET", "/metrics")[1])

    def cpu_s(self) -> float:
        """User and system time of its processes so far."""
        return sum(cpu_s_of(each.pid) for each in self._family())

    def close(self) -> None:
        """End it and its children."""
        family = self._family()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        still = {(each.pid, each.started) for each in running_processes()}
        for each in family:
            if (each.pid, each.started) in still:
                with suppress(ProcessLookupError):
                    os.kill(each.pid, signal.SIGKILL)
        self._process.wait()

    def _family(self) -> list[Process]:
        return family_of(self._process.pid, running_processes())

    def _request(self, method: str, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=REQUEST_S)
        with closing(connection):
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read().decode()
