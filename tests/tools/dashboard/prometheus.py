"""A real Prometheus on loopback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.kit.servers import free_port, wait_for

# The queries against a real server take a while, so they run only on request.
IS_WANTED = bool(os.environ.get("KVTIER_TEST_DASHBOARD"))
PROGRAM, TOOL = shutil.which("prometheus"), shutil.which("promtool")
MISSING = "make test-dashboard; it needs a Prometheus: apt-get install prometheus"


@dataclass(frozen=True)
class Prometheus:
    url: str

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer. Fail if Prometheus rejects the query."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def ask(self, query: str) -> list[Any]:
        """Return the current samples of a query."""
        found: list[Any] = self.get("query", query=query)["result"]
        return found

    def wait_for_scrapes(self, job: str, number: int) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if self.ask(f'count_over_time(up{{job="{job}"}}[5m]) >= {number}'):
                return
            time.sleep(0.2)
        raise AssertionError(f"{job} was not scraped {number} times")


@contextmanager
def prometheus(folder: Path, targets: Mapping[str, str], rules: Path) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes ``targets`` (by job) and evaluates ``rules`` twice a second."""
    assert PROGRAM is not None
    settings = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {"job_name": job, "scrape_timeout": "400ms", "static_configs": [{"targets": [at]}]}
            for job, at in targets.items()
        ],
    }
    config, port = folder / "prometheus.yml", free_port()
    config.write_text(json.dumps(settings))  # JSON is valid YAML
    command = [PROGRAM, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for(port, process)
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(30)


def promtool(*arguments: str | Path) -> str:
    """Return promtool's output. Fail if it finds an error."""
    assert TOOL is not None
    done = subprocess.run([TOOL, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
