"""The real program starts, ends on SIGTERM with requests in flight, and exits with 0."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from threading import Thread

import httpx
import openai
import pytest

from kvtier.observe.logs import BURST
from tests.kit.waiting import wait_until

from .program import program
from .raw import COMPLETIONS, dial, head

pytestmark = pytest.mark.engine


def end(process: subprocess.Popen[str]) -> str:
    """Wait until the process ends by itself. Return its stderr."""
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    return errors


def refuses(url: str) -> bool:
    try:
        dial(url).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:  # it was in the backlog when the socket was closed
        return False
    return False


def body(max_tokens: int, stream: bool) -> dict[str, object]:
    return {
        "model": "mine",
        "prompt": "import",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": stream,
    }


@pytest.mark.slow
@pytest.mark.nightly
def test_requests_in_flight_are_finished_and_no_new_ones_taken() -> None:
    with program("--served-model-name", "mine") as (process, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        with client:
            assert client.models.list().data[0].id == "mine"
            stream = client.completions.create(
                model="mine",
                prompt="import",
                max_tokens=150,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            chunks = [next(stream)]
            whole: list[httpx.Response] = []
            waiting = Thread(
                target=lambda: whole.append(
                    httpx.post(f"{url}/v1/completions", json=body(150, False), timeout=60)
                )
            )
            waiting.start()
            wait_until(
                lambda: httpx.get(f"{url}/health").json()["running"] == 2, "both requests run"
            )
            half = dial(url)
            late = json.dumps(body(1, False)).encode()
            half.sendall(head(COMPLETIONS, f"Content-Length: {len(late)}") + late[:5])
            wait_until(
                lambda: '{endpoint="models",status="200"} 1.0' in httpx.get(f"{url}/metrics").text,
                "the server reads",
            )
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: refuses(url), "nobody new is let in")
            half.sendall(late[5:])
            with half, half.makefile("rb") as answer:
                assert answer.readline().startswith(b"HTTP/1.1 503 ")
                assert b"shutting_down" in answer.read()
            chunks += stream
            waiting.join(60)
        assert sum(bool(chunk.choices) for chunk in chunks) > 50
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 150
        assert [answer.status_code for answer in whole] == [200]
        assert whole[0].json()["usage"]["completion_tokens"] == 150
        assert "shutting down" in end(process)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("grace", "signals"),
    [
        ("0.2", [signal.SIGTERM]),
        ("0.2", [signal.SIGHUP]),
        ("1000", [signal.SIGINT, signal.SIGINT]),
    ],
)
def test_after_the_grace_or_a_second_signal_answers_are_cut_short_properly(
    grace: str, signals: list[signal.Signals]
) -> None:
    name = ("--served-model-name", "mine")
    with program(*name, "--shutdown-grace-s", grace, KVTIER_API_KEY="secret") as (process, url):
        headers = {"Authorization": "Bearer secret"}
        whole: list[httpx.Response] = []
        waiting = Thread(
            target=lambda: whole.append(
                httpx.post(
                    f"{url}/v1/completions", json=body(5000, False), headers=headers, timeout=60
                )
            )
        )
        asked = body(5000, True)
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=asked, headers=headers, timeout=60
        ) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: {")
            waiting.start()
            wait_until(
                lambda: httpx.get(f"{url}/health").json()["running"] == 2, "both requests run"
            )
            for number in signals:
                process.send_signal(number)
                wait_until(lambda: refuses(url), "the signal arrived")
            events = [line for line in lines if line]
        waiting.join(60)
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert whole[0].status_code == 503
        assert whole[0].json()["error"]["code"] == "shutting_down"
        assert "secret" not in end(process)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_a_server_that_loads_its_model(number: signal.Signals) -> None:
    """Without a handler, process 1 of a container would ignore the signal."""
    command = [sys.executable, "-m", "kvtier.tools.cli", "serve", "--port", "0", "--threads", "1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        while "loading model" not in (line := process.stderr.readline()):
            assert line, "it ended"
        process.send_signal(number)
        said, errors = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, ""), errors
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.nightly
def test_without_a_free_descriptor_the_log_stays_short_and_the_server_comes_back() -> None:
    with program() as (process, url):
        num_open = len(os.listdir(f"/proc/{process.pid}/fd"))
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (num_open + 20, hard))
        clients = [dial(url) for _ in range(200)]
        wait_until(
            lambda: len(os.listdir(f"/proc/{process.pid}/fd")) >= num_open + 20, "all are taken"
        )
        for client in clients:
            client.close()
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert 0 < errors.count("connections not accepted") <= BURST + 2
