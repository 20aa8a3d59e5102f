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

# A server that is asked of all sides takes a while: only where that is wanted.
IS_WANTED = bool(os.environ.get("KVTIER_TEST_DASHBOARD"))
PROGRAM, TOOL = shutil.which("prometheus"), shutil.which("promtool")
MISSING = "make test-dashboard; it needs a Prometheus: apt-get install prometheus"


@dataclass(frozen=True)
class Prometheus:
    url: str

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer; what is wrong with a query fails here."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def ask(self, query: str) -> list[Any]:
        """Samples as they are now."""
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
    """Scrapes targets, by job, twice a second. rules: evaluated as often."""
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
    config.write_text(json.dumps(settings))  # which is YAML, too
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
    """Return promtool's output; fail if it finds fault."""
    assert TOOL is not None
    done = subprocess.run([TOOL, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
