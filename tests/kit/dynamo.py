"""Dynamo's indexer, a reader of block events, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from tests.kit.servers import free_port
from tests.kit.waiting import wait_until

PYTHON = Path(__file__).resolve().parents[2] / ".peers/routers/bin/python"
needs_routers = pytest.mark.skipif(
    not PYTHON.exists(), reason="no routers: make test-routers installs them"
)


class DynamoIndexer:
    """Dynamo's stand-alone indexer: events of engines in, tokens per engine and tier out."""

    def __init__(self, folder: Path) -> None:
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        self._log = folder / "indexer.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [PYTHON, "-m", "dynamo.indexer", "--port", str(port)],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._num_registered = 0
        wait_until(self._answers, "the indexer answers")

    def _answers(self) -> bool:
        assert self._process.poll() is None, self.log
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=5):
                return True
        except OSError:
            return False

    @property
    def log(self) -> str:
        return self._log.read_text()

    def register(
        self,
        engine: int,
        endpoints: Sequence[str],
        block_size: int,
        rank: int = 0,
        model: str = "model",
    ) -> None:
        """Let it subscribe to an engine's events. endpoints: of events, and of their replay.

        rank: of the engine; a further one stands for the engine's node.
        """
        events, replay = endpoints
        self._post(
            "register",
            instance_id=engine,
            endpoint=events,
            replay_endpoint=replay,
            model_name=model,
            block_size=block_size,
            dp_rank=rank,
        )
        self._num_registered += 1
        num = self._num_registered
        wait_until(lambda: self.log.count("Replay socket connected") == num, "it subscribes")

    def found(
        self, prompt: Sequence[int], salt: str = "", model: str = "model"
    ) -> dict[int, dict[str, int]]:
        """Return the tokens of a prompt that each engine has in each tier."""
        salted = {"cache_salt": salt} if salt else {}
        answer = self._post("query", token_ids=list(prompt), model_name=model, **salted)
        tiers = ("gpu", "cpu", "disk")
        return {
            int(engine): {tier: known[tier] for tier in tiers if known[tier]}
            for engine, known in answer["instances"].items()
        }

    def _post(self, path: str, **body: object) -> Any:
        request = urllib.request.Request(
            f"{self._url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
