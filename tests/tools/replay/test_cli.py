"""``kvtier replay`` and ``kvtier record``, from a file to table, JSON and report."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from kvtier.connectors.common.settings import StoreSettings
from kvtier.core.hot import NATIVE
from kvtier.tools.cli import app
from kvtier.tools.report import figures
from tests.kit.outline import outline

has_report = pytest.mark.skipif(
    find_spec("matplotlib") is None or find_spec("jinja2") is None, reason="needs the replay extra"
)


def kvtier(*arguments: object) -> Result:
    return CliRunner().invoke(
        app, [str(argument) for argument in arguments], env={"COLUMNS": "120"}
    )


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eighty conversations of eight turns in four hours. Each turn is three blocks longer."""
    chance = random.Random(5)
    requests = []
    for number in range(80):
        start_s = chance.random() * 3 * 3600
        for turn in range(8):
            ids = [0, 1, *(1000 * (number + 1) + at for at in range(3 * (turn + 1)))]
            at_s = start_s + turn * chance.uniform(100, 400)
            fields = {"timestamp": int(1000 * at_s), "input_length": 512 * len(ids) - 9}
            requests.append(json.dumps(fields | {"output_length": 100, "hash_ids": ids}))
    path = tmp_path_factory.mktemp("traces") / "conversations.jsonl"
    path.write_text("\n".join(requests))
    return path


def replayed(trace: Path, *options: object) -> Any:
    result = kvtier("replay", trace, "--no-report", "--json", "-", *options)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_figures_fit_together(conversations: Path) -> None:
    found = replayed(conversations, "--device-capacity", "4GiB", "--policies", "lru,opt")
    trace = found["trace"]
    assert trace["requests"] == 640
    assert trace["unique_blocks"] == 2 + 80 * 24
    assert trace["references"] == sum(80 * (2 + 3 * (turn + 1)) for turn in range(8))
    ceiling = 1 - trace["unique_blocks"] / trace["references"]
    assert found["infinite"]["hit_ratio"] == pytest.approx(ceiling, abs=1e-5)
    lru, best = found["hits"]["lru"], found["hits"]["opt"]
    for ours, theirs in zip(lru, best, strict=True):
        assert ours["hit_ratio"] <= theirs["hit_ratio"] <= ceiling + 1e-5
    assert lru[-1]["hit_ratio"] == pytest.approx(ceiling, abs=1e-5)
    sizes = [each["bytes"] for each in lru]
    assert sizes[0] > 4 << 30
    assert sizes[-1] >= trace["unique_blocks"] * 512 * 131_072 > sizes[-2]
    for point in found["host"]:
        saved = point["seconds_saved_per_hour"] / 3600 * 2.5
        assert point["saved_per_hour"] == pytest.approx(saved, abs=1e-5)
    assert {each["source"] for each in found["assumptions"]} == {"assumed", "given"}


def test_dear_accelerators_ask_for_memory_and_free_ones_for_none(conversations: Path) -> None:
    common = ("--device-capacity", "1GiB")
    dear = replayed(conversations, *common, "--accelerator-price-per-hour", "1000")
    bought = dear["recommendation"]
    assert bought["text"].startswith("Buy ")
    assert bought["host_bytes"] > 1 << 30
    assert bought["net_per_hour"] > 0
    assert bought["interval_95"][0] <= bought["seconds_per_hour"] <= bought["interval_95"][1]
    assert "Evidence: 639 requests" in bought["text"]
    assert [each["name"] for each in dear["setups"]] == ["as it is", "recommended"]
    assert "More may pay, too: sizes above " in bought["text"]
    few = (*common, "--accelerator-price-per-hour", "1000", "--sizes", "2GiB,4GiB")
    assert "no larger size was simulated" in replayed(conversations, *few)["recommendation"]["text"]
    free = replayed(conversations, *common, "--accelerator-price-per-hour", "0")
    assert free["recommendation"]["host_bytes"] is None
    assert free["recommendation"]["text"].startswith("Buy neither host memory nor a disk")


def test_a_disk_is_bought_alone_where_host_memory_is_dear(conversations: Path) -> None:
    prices = ("--host-price-per-gib", "1e6", "--accelerator-price-per-hour", "1000")
    common = ("--device-capacity", "1GiB", *prices)
    bought = replayed(conversations, *common, "--disk-full-writes", "50")["recommendation"]
    assert bought["host_bytes"] is None
    assert bought["disk_bytes"] > 1 << 30
    assert "kvtier also needs a little host memory as a read buffer." in bought["text"]
    assert " days: its cost is spread over that time." in bought["text"]
    lasting = replayed(conversations, *common, "--disk-full-writes", "1e9")["recommendation"]
    assert "worn after" not in lasting["text"]
    assert lasting["net_per_hour"] > bought["net_per_hour"]


def test_tiers_that_were_asked_for_are_told_about(conversations: Path) -> None:
    options = ("--device-capacity", "1GiB", "--host-capacity", "8GiB", "--disk-capacity", "1TiB")
    setups = replayed(conversations, *options)["setups"]
    asked = next(setup for setup in setups if setup["name"] == "asked for")
    assert (asked["host_bytes"], asked["disk_bytes"]) == (8 << 30, 1 << 40)
    as_it_is = setups[0]["tokens"]
    assert as_it_is["host"] == as_it_is["disk"] == 0
    assert asked["tokens"]["device"] == as_it_is["device"]
    assert asked["tokens"]["host"] > 0
    assert asked["tokens"]["disk"] > 0


def test_a_device_that_holds_everything_needs_no_more(conversations: Path) -> None:
    result = kvtier("replay", conversations, "--no-report", "--device-capacity", "1TiB")
    assert result.exit_code == 0, result.output
    assert "The device pool holds the whole trace." in result.stdout
    assert "no more memory is needed" in " ".join(result.stdout.split())


def test_a_short_trace_is_too_small_to_tell(conversations: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text("\n".join(conversations.read_text().splitlines()[:20]))
    found = replayed(path, "--sizes", "1GiB,2GiB")
    assert found["recommendation"]["text"].startswith("Too small to tell: 19 of its requests")
    told = kvtier("replay", path, "--no-report", "--sizes", "1GiB,2GiB")
    text = told.stdout.replace("\u00a0", " ")
    rows = [line for line in text.splitlines() if "GiB" in line and "$" in line and "–" in line]
    assert rows
    assert not any(re.search(r"[$][0-9.]+, ", line) for line in rows), rows
    assert found["recommendation"]["host_bytes"] is None


@pytest.mark.skipif(not NATIVE, reason="without the native core LRU serves")
def test_advice_is_for_the_policy_that_serves_with_lru_beside_it(conversations: Path) -> None:
    options = ("--device-capacity", "1GiB", "--accelerator-price-per-hour", "1000")
    found = replayed(conversations, *options)
    assert found["policy"] == StoreSettings.__dataclass_fields__["eviction_policy"].default
    assert list(found["hits"]) == ["runs", "lru", "opt"]
    bought = found["recommendation"]["host_bytes"]
    lru, learned = (
        next(each["hit_ratio"] for each in found["hits"][name] if each["bytes"] == bought)
        for name in ("lru", "runs")
    )
    text = found["recommendation"]["text"].replace("\u00a0", " ")
    beside = rf"hits {100 * learned:.1f} % of the blocks \(under LRU {100 * lru:.1f} %\)"
    assert re.search(beside, text), text
    seconds = found["recommendation"]["seconds_per_hour"]
    busy = seconds / 3600
    work = f"{figures.percent(busy)} of an accelerator".replace("\u00a0", " ")
    if busy >= 1:
        work = f"{figures.number(busy)} accelerators"
    assert f"the work of {work}," in text


def test_rows_are_marked_by_text_where_there_are_no_colours(conversations: Path) -> None:
    options = ("--device-capacity", "1GiB", "--accelerator-price-per-hour", "1000")
    result = kvtier("replay", conversations, "--no-report", *options)
    text = result.stdout.replace("\u00a0", " ")
    assert "\x1b" not in text
    assert len(re.findall("<- recommended", text)) == 1
    tables = text.partition("Host memory, without")[2].partition("Prompt tokens by source")[0]
    rows = [line for line in tables.splitlines() if re.match("│ [0-9]", line)]
    assert any("can't tell" in row for row in rows)
    for row in rows:
        assert ("can't tell" in row) == ("–," in row), row
    alone = subprocess.run(
        [
            sys.executable,
            "-m",
            "kvtier.tools.cli",
            "replay",
            conversations,
            "--no-report",
            *options,
        ],
        capture_output=True,
        text=True,
        check=True,
        env={name: each for name, each in os.environ.items() if name != "COLUMNS"},
    )
    assert "…" not in alone.stdout


@has_report
def test_a_line_is_solid_only_where_the_trace_can_tell(conversations: Path) -> None:
    from matplotlib.figure import Figure

    from kvtier.tools.replay import plots
    from kvtier.tools.replay.sizing import Point

    points = [
        Point(1 << at, 1, 0.5, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 0.0, supported=at < 3)
        for at in range(6)
    ]
    for num_told in (3, 0, 6):
        axes = Figure().add_subplot()
        told = [at < num_told for at in range(6)]
        plots._worth(axes, points, told, "#000000", None)
        solid = [line for line in axes.get_lines() if line.get_label() == "value"]
        assert sum(np.size(line.get_xdata()) for line in solid) == num_told
        pale = [line for line in axes.get_lines() if line.get_label() == "can't tell"]
        assert len(pale) == (num_told < 6)
        assert all(line.get_alpha() < 0.5 for line in pale)


def test_sizes_may_be_shares_of_the_trace(conversations: Path) -> None:
    found = replayed(conversations, "--sizes", "50%, 1GiB,10 %", "--bytes-per-token", "1000")
    blocks = [each["blocks"] for each in found["hits"]["lru"]]
    assert blocks == [192, 961, (1 << 30) // 512_000]


def test_more_prompts_than_any_fleet_computes_are_refused(conversations: Path) -> None:
    result = kvtier("replay", conversations, "--no-report", "--prefill-tokens-per-s", "0.001")
    assert result.exit_code == 2
    assert "10,000 accelerators would not do" in " ".join(result.output.split())


def test_the_table_says_what_to_buy_and_why(conversations: Path) -> None:
    result = kvtier("replay", conversations, "--no-report", "--device-capacity", "4GiB")
    text = " ".join(result.stdout.split()).replace("\u00a0", " ")
    assert result.exit_code == 0, result.output
    assert "640 requests over" in text
    assert "Host memory, without a disk" in text
    assert "the engine's own KV memory" in text
    assert "Assumed, not set by options: KV of a token" in text


@has_report
def test_the_report_is_one_well_formed_file(conversations: Path, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "report.html"
    result = kvtier("replay", conversations, "--report", path, "--device-capacity", "1GiB")
    assert result.exit_code == 0, result.output
    assert f"Report: {path}" in result.stdout
    html = path.read_text()
    found = outline(html)
    assert len(found.ids) == len(set(found.ids))
    assert all(link.startswith("#") for link in found.links)
    assert "<script" not in html
    assert not re.search(r"url\((?!#)", html)
    assert html.count("<svg") == 4  # two figures, for wide and for narrow pages
    text = " ".join(" ".join(found.text).split()).replace("\u00a0", " ")
    assert "conversations.jsonl" in text
    assert "Evidence: " in text
    assert "unlimited: " in text
    assert not re.search(r"#1010[0-9a-f]{2}", html)  # all colours are defined by the page


@has_report
def test_the_report_of_a_weak_trace_says_so(conversations: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text("\n".join(conversations.read_text().splitlines()[:2]))
    result = kvtier("replay", path, "--report", tmp_path / "report.html")
    assert result.exit_code == 0, result.output
    assert "Too small to tell" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--policies", "mru"], "--policies: 'mru' is unknown"),
        (["--sizes", "much"], "--sizes: can't read 'much' as a size"),
        (["--sizes", "0"], "--sizes: '0' is no size to look at"),
        (["--sizes", "1KiB"], "--sizes: 1,024 bytes hold no block: one takes 67,108,864 bytes"),
        (["--device-capacity", "big"], "--device-capacity: can't read"),
        (["--bytes-per-token", "0"], "--bytes-per-token: 0 is not above 0"),
        (["--model", "/nowhere"], "--model: /nowhere can't be read"),
        (["--bench", "/nowhere"], "--bench: /nowhere can't be read"),
        (["--prefill-doubles-at", "0"], "--prefill-doubles-at: 0.0 is not above 0"),
        (["--disk-price-per-gib", "-1"], "disk_price: -1.0 is below 0"),
        (["--coarsen", "0"], "--coarsen: 0 is below 1"),
        (["--hours", "nan"], "--hours: nan is no time"),
    ],
)
def test_what_cant_be_used_is_told_in_one_sentence(
    conversations: Path, options: list[str], sentence: str
) -> None:
    result = kvtier("replay", conversations, "--no-report", *options)
    assert result.exit_code == 2
    assert f"kvtier replay: {sentence}" in result.stderr
    assert "Traceback" not in result.output


def test_a_bad_line_is_told_with_its_file_and_number(conversations: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(conversations.read_text() + "\n{]")
    result = kvtier("replay", path, "--no-report")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].endswith(
        "bad.jsonl:641: no JSON; every line of this trace is a JSON value"
    )


def test_a_log_is_recorded_without_its_tokens(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(
        "".join(
            f"INFO 11-22 09:00:{at:02} [logger.py:39] Received request cmpl-{at}: prompt: '', "
            f"params: SamplingParams(n=1), prompt_token_ids: {[*range(70000, 70128), at]}, x\n"
            for at in range(3)
        )
    )
    result = kvtier("record", log, "--to", tmp_path / "trace.jsonl")
    assert result.exit_code == 0, result.output
    assert "3 requests in " in result.stderr
    assert "70001" not in (tmp_path / "trace.jsonl").read_text()
    found = replayed(tmp_path / "trace.jsonl", "--sizes", "1GiB")
    assert found["trace"]["references"] == 6
    assert found["trace"]["unique_blocks"] == 2
    again = kvtier("record", log, "--to", tmp_path / "trace.jsonl")
    assert again.exit_code == 2
    assert "is there already" in again.stderr
    log.write_text(log.read_text().splitlines()[0])
    alone = kvtier("record", log, "--to", tmp_path / "alone.jsonl")
    assert alone.stderr.startswith("1 request in ")


def test_replaying_needs_no_torch(conversations: Path) -> None:
    code = (
        "import sys; sys.argv[0] = 'kvtier'; sys.modules['torch'] = None\n"
        "from kvtier.tools.cli import app; app(standalone_mode=False)\n"
        "assert not {'transformers', 'fastapi'} & {*sys.modules}\n"
    )
    command = [sys.executable, "-c", code, "replay", str(conversations), "--no-report"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "640 requests" in done.stdout
