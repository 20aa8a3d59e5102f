"""Recordings under an engine: requests are served whether a recording is on, off or fails."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connectors.common.recording import open_recorder, record_tokens
from kvtier.connectors.sglang.shared import recording as under_sglang
from kvtier.connectors.sglang.shared.prefill import SCHEDULER, PrefillWatch
from kvtier.connectors.vllm.shared.settings import VllmSettings
from kvtier.observe.recording import Chains
from kvtier.tools.replay.traces import ReadOptions, read_traces

CHAINS = Chains(b"s" * 32, 64)


def test_a_key_names_whole_blocks_of_the_engine_and_not_too_few_tokens() -> None:
    assert [record_tokens(each) for each in (1, 16, 24, 64, 128)] == [64, 64, 72, 64, 128]


def test_nothing_is_written_where_nobody_asks(tmp_path: Path) -> None:
    assert open_recorder(VllmSettings(), 64, lambda written: None) is None
    assert not list(tmp_path.iterdir())


def test_replicas_with_one_setting_write_a_file_each(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    settings = VllmSettings(record=str(tmp_path / "logs" / "trace.jsonl"))
    made = [open_recorder(settings, 64, lambda written: None, each) for each in ("", "replica1")]
    for each in made:
        assert each is not None
        each.close()
    names = sorted(each.name for each in (tmp_path / "logs").iterdir())
    assert names == ["trace-replica1.jsonl", "trace.jsonl"]


@pytest.mark.parametrize(
    ("name", "salt", "told"),
    [
        ("", "", "record: can't write"),
        ("letter", "", "letter is there and is no recording; name another file"),
        ("letter/below", "", "record: there is no directory"),
        ("trace", "short", "KVTIER_RECORD_SALT: 5 characters can be guessed"),
    ],
)
def test_what_cant_be_written_is_one_sentence_and_no_error(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    salt: str,
    told: str,
) -> None:
    (tmp_path / "letter").write_text("Dear")
    monkeypatch.setenv("KVTIER_RECORD_SALT", salt)
    settings = VllmSettings(record=str(tmp_path / name))
    assert open_recorder(settings, 64, lambda written: None) is None
    (sentence,) = caplog.messages
    assert sentence.startswith("kvtier serves without a recording: ")
    assert told in sentence


def test_what_is_left_out_is_counted_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counted: list[bool] = []
    made = open_recorder(VllmSettings(record=str(tmp_path / "trace")), 64, counted.append)
    assert made is not None
    made.close()
    for _ in range(3):
        made.offer(0.0, [1], 1)
    assert counted == [False] * 3
    assert len(caplog.messages) == 1


# -- under SGLang ----------------------------------------------------------------------------------


class Request:
    """SGLang's request, with the fields that are read."""

    input_embeds = None
    extra_key: str | None = None
    cache_salt: str | None = None

    def __init__(self, rid: str, tokens: list[int], **more: object) -> None:
        self.rid, self.origin_input_ids, self.output_ids = rid, tokens, [0, 0]
        self.is_over = False
        self.__dict__.update(more)

    def finished(self) -> bool:
        return self.is_over


def config(**changes: int) -> Any:
    ranks = {"tp_rank": 0, "pp_rank": 0, "attn_cp_rank": 0, "dp_rank": 0}
    return SimpleNamespace(**{**ranks, **changes})


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> PrefillWatch:
    made = PrefillWatch()
    monkeypatch.setattr(under_sglang, "WATCH", made)
    return made


def step(watch: PrefillWatch, batch: list[Request], ends: list[Request]) -> None:
    """Let SGLang's scheduler process the results of a batch."""

    def process(*_: Any) -> None:
        for end in ends:
            end.is_over = True

    hook = watch.hooks()[f"{SCHEDULER}.process_batch_result"]
    hook(process, None, SimpleNamespace(reqs=batch), object())


def test_first_rank_records_each_request_once_when_it_ends(
    watch: PrefillWatch, tmp_path: Path
) -> None:
    path = tmp_path / "trace"
    settings = VllmSettings(record=str(path))
    for rank in ("tp_rank", "pp_rank", "attn_cp_rank"):
        under_sglang.Recording(settings, config(**{rank: 1}), 64, 0)
        assert not watch.end_listeners
        assert not path.exists()
    made = under_sglang.Recording(settings, config(), 64, 0)
    tokens = list(range(200))
    one, two = Request("1", tokens), Request("2", [*tokens[:130], 7])
    step(watch, [one, two], ends=[])
    step(watch, [one, two], ends=[one])
    step(watch, [one, two], ends=[two])  # the first one is in it for a step more
    others = [
        Request("3", tokens, cache_salt="tenant"),
        Request("4", tokens, extra_key="adapter"),
        Request("5", tokens, input_embeds=[[0.0]]),
        Request("HEALTH_CHECK_1", [0]),
        Request("6", tokens),
    ]
    step(watch, others, ends=others)
    made.close()
    step(watch, [late := Request("7", tokens)], ends=[late])
    trace = read_traces([path], ReadOptions(CHAINS))
    assert trace.input_tokens.tolist() == [200, 131, 200, 200, 200]
    assert trace.output_tokens.tolist() == [2] * 5
    assert trace.block_tokens == 64
    keys = [
        trace.keys[a:b].tolist() for a, b in zip(trace.offsets, trace.offsets[1:], strict=False)
    ]
    assert keys[0][:2] == keys[1]
    assert keys[0] == keys[4]
    assert not {*keys[0]} & {*keys[2], *keys[3]}


def test_a_clock_that_is_set_moves_no_request(
    watch: PrefillWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace"
    made = under_sglang.Recording(VllmSettings(record=str(path)), config(), 64, 0)
    since = time.perf_counter()
    for number, shown in enumerate((1.7e9, 100_000.0, 1.7e9)):
        monkeypatch.setattr(time, "time", lambda now=shown: now)
        stats = SimpleNamespace(created_time=since - 9 + 3 * number)
        one = Request(str(number), list(range(200)), time_stats=stats)
        step(watch, [one], ends=[one])
    made.close()
    times = read_traces([path], ReadOptions(CHAINS)).times
    assert (times - times[0]).tolist() == pytest.approx([0, 3, 6], abs=1), "when they were created"


def test_attention_replicas_record_beside_each_other(watch: PrefillWatch, tmp_path: Path) -> None:
    settings = VllmSettings(record=str(tmp_path / "trace"))
    made = [under_sglang.Recording(settings, config(dp_rank=rank), 16, 3) for rank in (0, 1)]
    for recording in made:
        recording.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "trace-replica3",
        "trace-replica3-dp1",
    ]


def test_request_that_cant_be_read_fails_nothing(
    watch: PrefillWatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = under_sglang.Recording(VllmSettings(record=str(tmp_path / "trace")), config(), 16, 0)
    step(watch, [odd := Request("1", None)], ends=[odd])
    made.close()
    assert "a request was not recorded" in caplog.text


def test_a_plug_in_leaves_it_to_its_engine_when_prometheus_is_imported() -> None:
    """Imported too early, prometheus does not show the metrics of the engine's processes."""
    script = (
        "import sys, kvtier.cache.ladder, kvtier.observe, kvtier.connectors.sglang.plugin\n"
        "assert 'prometheus_client' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
