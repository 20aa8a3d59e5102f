"""Real vLLM servers on the CPU, in processes of their own, that can be killed and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.engines.vllm.engines import ENVIRONMENT, MODEL, NUM_BLOCKS, Answer, multi
from tests.kit.servers import free_port
from tests.kit.waiting import wait_until

START_S = 600
Config = dict[str, Any]
"""Value of ``--kv-transfer-config``."""


@dataclass(frozen=True)
class Reply:
    """Answer of a server.

    num_cached: tokens of the prompt that it had or loaded. transfer: ``kv_transfer_params`` for
    the other server. total_s: time to the whole answer.
    """

    num_cached: int
    answer: Answer
    transfer: Config | None
    total_s: float


@dataclass
class VllmServer:
    """A server of the built-in model. Close it. kill, start: as a crash and a restart.

    options: of the server. variables: of its environment.
    """

    folder: Path
    options: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = str(free_port())
        url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=url, timeout=600)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """All that the server has logged so far."""
        return (self.folder / "log").read_text(errors="replace")

    def start(self) -> None:
        """Start the process. ``wait`` for it."""
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={MODEL}"]
        command += ["--host=127.0.0.1", f"--port={self.port}", "--dtype=float32", "--enforce-eager"]
        command += [f"--num-gpu-blocks-override={NUM_BLOCKS}", "--max-model-len=4096"]
        command += ["--enable-prompt-tokens-details", "--served-model-name=tiny", *self.options]
        with (self.folder / "log").open("a") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, **self.variables},
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until the server answers."""
        assert self._process is not None, "it was not started"
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and self._process.poll() is None:
            try:
                if self.client.get("/health").is_success:
                    return
            except httpx.TransportError:
                time.sleep(0.5)
        pytest.fail(f"the server does not answer:\n{self.log[-3000:]}")

    def kill(self) -> None:
        """Kill the server and its engine at once."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """End the server as its operator does; kill what is left of it."""
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
            with suppress(ProcessLookupError):
                self.kill()

    def ask(self, tokens: list[int], max_tokens: int = 6, **body: Any) -> Reply:
        """Return the answer to a prompt. Raises ``httpx.HTTPStatusError`` if it failed."""
        body = {"model": "tiny", "prompt": tokens, "max_tokens": max_tokens, **body}
        body |= {"temperature": 0, "logprobs": 4, "ignore_eos": True}
        body["return_tokens_as_token_ids"] = True
        begin_s = time.monotonic()
        found = self.client.post("/v1/completions", json=body).raise_for_status().json()
        total_s = time.monotonic() - begin_s
        details = found["usage"]["prompt_tokens_details"]
        (choice,) = found["choices"]
        assert choice["finish_reason"] == "length", found
        steps = [
            {int(token.partition(":")[2]): value for token, value in step.items()}
            for step in choice["logprobs"]["top_logprobs"]
        ]
        answer = [
            [int(token.partition(":")[2]) for token in choice["logprobs"]["tokens"]],
            [dict(sorted(step.items())) for step in steps],
        ]
        num_cached = details["cached_tokens"] if details else 0
        return Reply(num_cached, answer, found.get("kv_transfer_params"), total_s)

    def reset_pool(self) -> None:
        """Empty the device's prefix cache; wait until nothing holds its pages."""
        wait_until(self.has_reset_pool, "the pool is empty")

    def has_reset_pool(self) -> bool:
        """Empty the device's prefix cache, unless something holds its pages."""
        before = self.log.count("Successfully reset prefix cache")
        self.client.post("/reset_prefix_cache").raise_for_status()
        return self.log.count("Successfully reset prefix cache") > before

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's values with these labels."""
        text = self.client.get("/metrics").raise_for_status().text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@contextmanager
def serving(folder: Path, options: list[str], **variables: str) -> Iterator[httpx.Client]:
    """Run a server. options: those for its connector. variables: of its environment."""
    server = VllmServer(folder, options, variables)
    server.start()
    try:
        server.wait()
        yield server.client
    finally:
        server.stop()


NIXL: Config = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
}
"""NixlConnector between CPUs."""


def over_nixl(*inside: Config) -> Config:
    """Return the configuration of several connectors, one of which is NIXL."""
    return {**multi(*inside), "kv_buffer_device": "cpu"}


class PrefillDecode:
    """A prefill server and a decode server, with a core each. Close it.

    The client takes the place of the proxy that is in front of both.
    """

    def __init__(
        self,
        folder: Path,
        prefill: Config,
        decode: Config,
        prefill_options: Sequence[str] = (),
        decode_options: Sequence[str] = (),
    ) -> None:
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            pytest.skip("two servers need two cores")
        self.prefill = _nixl_server(folder / "prefill", prefill, cores[0], prefill_options)
        self.decode = _nixl_server(folder / "decode", decode, cores[1], decode_options)

    def start(self) -> None:
        for server in (self.prefill, self.decode):
            server.start()
        for server in (self.prefill, self.decode):
            server.wait()

    def ask(self, tokens: list[int]) -> tuple[Reply, Reply]:
        """Send a prompt through both servers. Return both answers; the second is the client's."""
        first = self.prefill_only(tokens)
        return first, self.decode.ask(tokens, kv_transfer_params=first.transfer)

    def prefill_only(self, tokens: list[int]) -> Reply:
        """Send a prompt to the prefill server, which holds its pages for the decode server."""
        return self.prefill.ask(tokens, max_tokens=1, kv_transfer_params=PREFILLS)

    def at_once(self, prompts: list[list[int]]) -> list[Reply]:
        """Send prompts at the same time; return the decode server's answers."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return [decoded for _, decoded in pool.map(self.ask, prompts)]

    def reset_pools(self) -> None:
        self.prefill.reset_pool()
        self.decode.reset_pool()

    def close(self) -> None:
        self.prefill.stop()
        self.decode.stop()


PREFILLS: Config = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Parameters of a request at a prefill server, as proxies of vLLM send them."""


def _nixl_server(
    folder: Path, config: Config, core: int, options: Sequence[str] = ()
) -> VllmServer:
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "UCX_TLS": "tcp,sm,self",
        "UCX_NET_DEVICES": "lo",
    }
    connects = ["--kv-transfer-config", json.dumps(config), *options]
    return VllmServer(folder, connects, variables)


@contextmanager
def prefill_decode(
    folder: Path, prefill: Config, decode: Config, **options: Sequence[str]
) -> Iterator[PrefillDecode]:
    pair = PrefillDecode(folder, prefill, decode, **options)
    try:
        pair.start()
        yield pair
    finally:
        pair.close()
