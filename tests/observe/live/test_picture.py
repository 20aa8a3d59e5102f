"""The picture made from a history of readings, and from too few of them."""

from __future__ import annotations

import io
import json
from math import inf

import pytest
from rich.console import Console

from kvtier.observe.live.charts import ChartHour
from kvtier.observe.live.history import MAX_AGE_S, History
from kvtier.observe.live.picture import Picture
from kvtier.observe.live.scrape import ScrapeResult
from kvtier.observe.live.terminal import Fitted, draw
from kvtier.observe.live.wording import TOO_FEW, count, seconds, share, size

from .texts import KVTIER, picture, reading, recorded

ASKED = "kvtier_prompt_blocks_total"
HITS = 'kvtier_hit_blocks_total{tier="%s"}'
DISK = {'kvtier_slots{tier="disk"}': 100}


def answer(picture: Picture, question: str) -> str:
    (found,) = (each.text for each in picture.answers if each.question.startswith(question))
    return found


@pytest.mark.parametrize("engine", ["kvtier", "vllm", "sglang"])
def test_each_engine_gives_a_whole_picture(engine: str) -> None:
    history = History()
    for turn in (1, 2):
        history.add(recorded(engine, turn, 10.0 * turn))
    seen = history.picture()
    assert (seen.has_cache, seen.has_restarted, seen.window_s) == (True, False, 10.0)
    assert {tier.name for tier in seen.tiers} >= {"device", "host", "disk"}
    assert all(tier.fill is None or 0 <= tier.fill <= 1 for tier in seen.tiers)
    assert ("disk", "host") in {(flow.src, flow.dst) for flow in seen.flows}
    assert seen.hit_share.ever is not None
    assert 0 < seen.hit_share.ever < 1
    assert seen.saved.tokens
    assert seen.loaded
    assert seen.requests.running is not None
    assert "host" in {guess.what for guess in seen.guesses}
    assert seen.answers[0].question == "Is it worth its memory?"
    assert json.loads(json.dumps(seen.as_json(), allow_nan=False))["engine"] == seen.engine


def test_an_engine_without_kvtier_is_told_so() -> None:
    seen = picture({"vllm:prompt_tokens_total": 5})
    assert (seen.engine, seen.has_cache) == ("vLLM", False)
    assert "runs without" in seen.answers[0].text


def test_copies_that_only_kvtier_counts_under_vllm_are_shown() -> None:
    moved = 'vllm:kvtier_moved_bytes_total{src="host",dst="device"}'
    seen = picture({"vllm:prompt_tokens_total": 5, moved: 7})
    (flow,) = (flow for flow in seen.flows if (flow.src, flow.dst) == ("host", "device"))
    assert flow.num_bytes == 7


def test_metrics_of_nobody_known_are_a_picture_of_nothing() -> None:
    seen = picture({"go_goroutines": 5}, {"go_goroutines": 6})
    assert (seen.engine, seen.tiers, seen.flows, seen.hits) == ("unknown", (), (), ())


def test_shares_are_of_what_was_asked_for_meanwhile() -> None:
    seen = picture(
        {KVTIER: 1, ASKED: 1000, HITS % "host": 900},
        {KVTIER: 2, ASKED: 1200, HITS % "host": 950, HITS % "disk": 50},
    )
    host, disk = seen.hits
    assert (host.tier, host.recent) == ("host", 0.25)
    assert host.ever == pytest.approx(950 / 1200)
    assert (disk.tier, disk.recent) == ("disk", 0.25)
    assert seen.hit_share.recent == 0.5


def test_a_share_of_too_few_is_not_told() -> None:
    seen = picture({KVTIER: 1, ASKED: 0}, {KVTIER: 2, ASKED: 99, HITS % "host": 99})
    assert (seen.hit_share.recent, seen.hit_share.ever) == (None, None)
    assert TOO_FEW.capitalize() in answer(seen, "Is it worth")


def test_one_reading_has_sums_and_no_rates() -> None:
    seen = picture({KVTIER: 1, "kvtier_saved_tokens_total": 70})
    assert (seen.saved.tokens, seen.saved.tokens_per_s) == (70, None)


def test_rates_are_over_the_time_between() -> None:
    route = 'kvtier_copied_bytes_total{src="disk",dst="host"}'
    seen = picture(
        {KVTIER: 1, route: 1000, "kvtier_saved_seconds_total": 1.0},
        {KVTIER: 1, route: 5000, "kvtier_saved_seconds_total": 6.0},
    )
    assert seen.flows[0].bytes_per_s == 400
    assert seen.saved.seconds_per_s == 0.5


def test_a_server_that_began_anew_is_not_compared_with_its_past() -> None:
    history = History()
    history.add(reading(0.0, {KVTIER: 9, ASKED: 1000, HITS % "host": 999}))
    history.add(reading(1.0, {KVTIER: 0, ASKED: 200, HITS % "host": 0}))
    seen = history.picture()
    assert (seen.has_restarted, seen.age_s) == (True, 0.0)
    assert (seen.hit_share.recent, seen.hit_share.ever) == (None, 0.0)
    history.add(reading(2.0, {KVTIER: 1, ASKED: 400, HITS % "host": 100}))
    assert history.picture().hit_share.recent == 0.5


def test_the_last_minute_is_a_minute() -> None:
    history = History()
    for at_s in range(300):
        history.add(reading(float(at_s), {KVTIER: at_s, ASKED: 10 * at_s}))
    assert history.picture().window_s == 60
    assert history.age_s == 299


def served(num: int, seconds: float, below_1_s: int, hits: int) -> dict[str, float]:
    """Return metrics of a server after ``num`` requests of 1000 blocks that took so long."""
    ttft = "kvtier_server_ttft_seconds"
    return {
        KVTIER: num,
        ASKED: 1000 * num,
        HITS % "host": hits,
        f"{ttft}_count": num,
        f"{ttft}_sum": seconds,
        f'{ttft}_bucket{{le="0.5"}}': 0,
        f'{ttft}_bucket{{le="1.0"}}': below_1_s,
        f'{ttft}_bucket{{le="2.0"}}': num,
        "kvtier_server_e2e_seconds_count": num,
        "kvtier_saved_seconds_total": float(num),
    }


def test_figures_of_requests_stay_as_they_are_after_the_last_one() -> None:
    """The fast requests of the first half minute would leave the window before the slow ones."""
    history = History()
    for at in range(7):  # 20 fast requests, then 20 slow ones, in a minute
        num = min(40, 10 * at)
        slow = max(0, num - 20)
        now = served(num, 0.6 * (num - slow) + 1.8 * slow, num - slow, 500 * num)
        history.add(reading(10.0 * at, now))
    seen = history.picture()
    assert seen.requests.ttft_s == pytest.approx(1.2)
    assert seen.hit_share.recent == 0.5
    last_s = 40.0
    assert seen.quiet_s == 60.0 - last_s
    for at_s in (95.0, 160.0, 230.0):
        plain = history.look(reading(at_s, now))
        assert plain["requests"]["ttft_s"] == seen.requests.ttft_s
        assert plain["requests"]["ttft_p95_s"] == seen.requests.ttft_p95_s
        assert plain["hit_share"]["recent"] == 0.5
        assert plain["saved"]["seconds_per_s"] == seen.saved.seconds_per_s
        assert plain["quiet_s"] == at_s - last_s
        assert plain["minute"] == "in the minute before the last request"
    assert plain["requests"]["per_s"] == 0.0, "it is a figure of now"
    assert plain["charts"]["ttft"] == {"mean": None, "p95": None}, "no line without requests"
    assert plain["charts"]["saved"] == {"saved": 0.0}
    plain = history.look(reading(240.0, served(41, 61.0, 21, 21_000)))
    assert plain["minute"] == "in the last minute"
    assert plain["requests"]["ttft_s"] is None, "one request is too few"


def test_the_95th_percentile_lies_within_its_bucket() -> None:
    seen = picture(served(0, 0.0, 0, 0), served(20, 12.0, 18, 0))
    assert seen.requests.ttft_p95_s == pytest.approx(1.5)
    assert seen.requests.ttft_s == pytest.approx(0.6)
    assert picture(served(0, 0.0, 0, 0), served(19, 12.0, 18, 0)).requests.ttft_p95_s is None


def test_a_share_is_of_the_same_minute_in_the_answer_as_in_the_figure() -> None:
    seen = picture(
        {KVTIER: 1, ASKED: 1000, HITS % "host": 900}, {KVTIER: 2, ASKED: 2000, HITS % "host": 960}
    )
    assert (seen.hit_share.recent, seen.hit_share.ever) == (0.06, 0.48)
    assert "6 % of prompt tokens came from the cache in the last minute." in answer(seen, "Is it")
    seen = picture({KVTIER: 1, ASKED: 1000, HITS % "host": 900})
    assert "90 % of prompt tokens came from the cache since the server's" in answer(seen, "Is it")


def test_an_hour_of_charts_never_grows_and_has_the_last_hour() -> None:
    hour = ChartHour()
    num_bytes = hour._values.nbytes
    assert num_bytes == 64 * 360 * 4
    for at in range(1000):
        series = {f"tenant {number}": float(at) for number in range(at % 100)}
        shown = hour.add(10.0 * at, {"found": series, "saved": {"saved": inf}})
        assert series.items() <= shown["found"].items(), "the page shows what is not kept, too"
        assert shown["saved"] == {"saved": None}
        hour.add(10.0 * at + 2, {"found": {"tenant 0": -1.0}})  # too soon
    assert hour._values.nbytes == num_bytes
    kept = json.loads(json.dumps(hour.as_json(10_000.0), allow_nan=False))
    assert (kept["ages_s"][0], kept["ages_s"][-1], len(kept["ages_s"])) == (3600.0, 10.0, 360)
    assert sum(map(len, kept["charts"].values())) == 64
    assert kept["charts"]["found"]["tenant 0"][-1] == 999.0
    assert kept["charts"]["found"]["tenant 0"][160] is None, "there was no tenant then"


def test_a_series_keeps_its_place_among_those_of_its_chart() -> None:
    hour = ChartHour()
    hour.add(0.0, {"hits": {"disk": 0.5}})
    for at_s in (10.0, 20.0):
        shown = hour.add(at_s, {"hits": {"host": 0.2, "disk": 0.3}})
        assert [*shown["hits"]] == ["disk", "host"]
    assert hour.add(30.0, {"hits": {}})["hits"] == {"disk": None, "host": None}


def test_a_short_while_of_many_readings_stays_bounded() -> None:
    history = History()
    for at in range(1000):
        history.add(reading(at / 100, {KVTIER: 1}))
    assert len(history._readings) == 256


@pytest.mark.parametrize(
    ("state", "word"),
    [
        (1, "being retried"),
        (2, "is paused"),
        (3, "shorter than it was. Find out what cut it, then"),
    ],
)
def test_storage_that_is_not_well_is_the_answer_to_why(state: int, word: str) -> None:
    queued = 'kvtier_queued_seconds{src="disk",dst="host"}'
    seen = picture({KVTIER: 1, 'kvtier_breaker_state{tier="disk"}': state, queued: inf})
    assert seen.tiers[0].left_alone == state
    assert (seen.flows[0].is_refused, seen.flows[0].queued_s) == (True, None)
    assert word in answer(seen, "Why was this slow")
    json.dumps(seen.as_json(), allow_nan=False)


def guesses(num: int, took_s: float, expected_s: float = 1.0) -> dict[str, float]:
    return {
        KVTIER: 1,
        'kvtier_predicted_load_seconds_total{src="disk"}': expected_s,
        'kvtier_actual_load_seconds_total{src="disk"}': took_s,
        'kvtier_load_error_ratio_count{src="disk"}': num,
        "kvtier_predicted_prefill_seconds_total": 2 * expected_s,
        "kvtier_actual_prefill_seconds_total": 2 * took_s,
    }


NO_GUESSES = guesses(0, 0.0, 0.0)


def test_estimates_are_judged_by_enough_copies() -> None:
    few = picture(NO_GUESSES, guesses(4, 0.6, 0.2))
    assert [guess.ratio for guess in few.guesses] == [None, None]
    assert "too few to tell whether they take as long" in answer(few, "Why was this slow")
    seen = picture(NO_GUESSES, guesses(5, 3.0))
    assert [guess.ratio for guess in seen.guesses] == [3.0, 3.0]
    said = answer(seen, "Why was this slow")
    assert "Loading from disk took 3 times as long as expected." in said
    seen = picture(NO_GUESSES, guesses(5, 1.1))
    assert "Loads take no longer than expected" in answer(seen, "Why was this slow")


def test_estimates_are_judged_by_the_last_minute_alone() -> None:
    """Estimates before the last minute do not count, nor do the totals of a single reading."""
    long_ago = guesses(100, 300.0, 100.0)
    assert [guess.ratio for guess in picture(long_ago).guesses] == [None, None]
    learned = guesses(105, 305.0, 105.0)
    disk, prefill = picture(long_ago, learned).guesses
    assert (disk.expected_s, disk.took_s, disk.num, disk.ratio) == (5.0, 5.0, 5, 1.0)
    assert (prefill.expected_s, prefill.took_s, prefill.ratio) == (10.0, 10.0, 1.0)
    disk, prefill = picture(long_ago, learned, *[learned] * 6, every_s=10.0).guesses
    assert (disk.expected_s, disk.took_s, disk.ratio, prefill.ratio) == (0.0, 0.0, None, None)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("kvtier_late_loads_total", "3 loads missed their deadline in the last minute"),
        ('kvtier_damaged_blocks_total{tier="disk"}', "Disk returned 3 damaged blocks"),
    ],
)
def test_why_it_was_slow_is_told_of_the_last_minute_alone(name: str, said: str) -> None:
    """Earlier trouble remains in the totals, but does not explain slowness now."""
    disk = {KVTIER: 1, 'kvtier_slots{tier="disk"}': 100}
    before, after = {**disk, name: 7}, {**disk, name: 10}
    assert "Nothing here delays requests" in answer(picture(before), "Why was this slow")
    assert said in answer(picture(before, after), "Why was this slow")
    assert said in answer(picture(disk, {**disk, name: 3}), "Why was this slow"), "told since then"
    seen = picture(before, *[after] * 8)
    assert "Nothing here delays requests" in answer(seen, "Why was this slow")
    assert 10 in (seen.late_loads, seen.tiers[0].damaged)


def returns(num_seen: int, weight: int, evicted: int) -> dict[str, float]:
    bucket = 'kvtier_return_seconds_bucket{tier="host",le="%s"}'
    return {
        KVTIER: 1,
        'kvtier_slots{tier="host"}': 100,
        'kvtier_evicted_blocks_total{tier="host"}': evicted,
        'kvtier_returned_blocks_total{tier="host"}': num_seen * weight,
        'kvtier_return_seconds_count{tier="host"}': num_seen,
        bucket % "10.0": num_seen // 4,
        bucket % "30.0": num_seen,
        bucket % "+Inf": num_seen,
    }


def test_returns_are_a_share_of_what_left_where_the_sample_bears_it() -> None:
    (host,) = picture(returns(40, 8, 640)).tiers
    assert (host.returned, host.return_s) == (0.5, 30.0)
    (few,) = picture(returns(2, 64, 640)).tiers
    assert (few.returned, few.return_s) == (None, None), "ten blocks were looked at"


def test_what_to_buy_names_the_tier_that_should_have_kept_more() -> None:
    said = answer(picture(returns(40, 8, 640)), "What should I buy")
    assert said.startswith(
        "50 % of the blocks evicted from host were requested again, half of them"
    )
    assert "sizing guide: kvtier serve --record, then kvtier replay" in said
    assert "Nothing yet" in answer(picture(returns(40, 1, 4000)), "What should I buy")
    assert TOO_FEW.capitalize() in answer(picture(returns(1, 1, 10)), "What should I buy")


def test_a_tier_is_told_in_bytes_as_it_is_bought() -> None:
    """If several engines report one tier, their slots are added; the slot size is not."""
    values = returns(40, 8, 640)
    values |= {f'kvtier_slots{{tier="host",engine="{each}"}}': 50 for each in range(2)}
    del values['kvtier_slots{tier="host"}']
    values['kvtier_used_slots{tier="host"}'] = 25
    assert picture(values).tiers[0].capacity_bytes is None, "an engine that does not tell it"
    values |= {f'kvtier_slot_bytes{{tier="host",engine="{each}"}}': 1 << 30 for each in range(2)}
    (host,) = picture(values).tiers
    assert (host.used_bytes, host.capacity_bytes) == (25 << 30, 100 << 30)
    said = answer(picture(values), "What should I buy")
    assert said.startswith("50 % of the blocks evicted from host (100 GiB) were requested again")


def test_the_server_says_which_model_which_version_and_since_when() -> None:
    info = 'kvtier_server_info{model_name="tiny",version="0.1.0"}'
    server = picture({KVTIER: 1, info: 1, "kvtier_server_uptime_seconds": 90}).server
    assert (server.models, server.version, server.uptime_s) == (("tiny",), "0.1.0", 90)
    history = History()
    history.add(recorded("vllm", 2, 0.0))
    server = history.picture().server
    assert (server.models, server.version, server.uptime_s) == (("tiny",), "", None)


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (share(None), TOO_FEW),
        (share(0.0), "0 %"),
        (share(0.001), "below 1 %"),
        (share(0.384), "38 %"),
        (seconds(0.0), "0 s"),
        (seconds(2.5e-5), "25 µs"),
        (seconds(0.0123), "12.3 ms"),
        (seconds(99.0), "99 s"),
        (seconds(600.0), "10 min"),
        (seconds(2e5), "2.31 d"),
        (count(9999), "9999"),
        (count(12345), "12.3 k"),
        (count(1.234e6), "1.23 M"),
        (size(0), "0 B"),
        (size(1536), "1.5 KiB"),
        (size(1020 << 10), "1020 KiB"),
        (size(5000 << 40), "5000 TiB"),
        (size(1500 << 20, 4), "1.465 GiB"),
        (seconds(-3.0), "0 s"),
        (seconds(3e8), "3472 d"),
        (count(999_960), "1000 k"),
        (size(3 << 30), "3 GiB"),
    ],
)
def test_numbers_are_short_and_have_their_unit(shown: str, text: str) -> None:
    assert shown == text


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_other_engines_are_told_to_record_by_the_command(engine: str) -> None:
    history = History()
    history.add(recorded(engine, 2, 0.0))
    assert "guide: kvtier record, then" in answer(history.picture(), "What should I buy")


def test_what_is_spared_is_said_as_engines() -> None:
    """294.5 s of computing saved per minute are shown as 4.9 engines, not as a time."""
    saved = "kvtier_saved_seconds_total"
    before = {KVTIER: 1, ASKED: 1000, HITS % "host": 900, saved: 0}
    after = {**before, saved: 294.5}
    said = answer(picture(before, after, every_s=60.0), "Is it worth its memory")
    assert "in the last minute as much as 4.9 engines like this compute." in said


def test_whether_kv_is_right_is_answered_where_hits_are_audited() -> None:
    def audits(**outcomes: int) -> dict[str, float]:
        name = 'kvtier_audits_total{tier="host",outcome="%s"}'
        found: dict[str, float] = {KVTIER: 1, 'kvtier_slots{tier="host"}': 100}
        return found | {name % outcome: num for outcome, num in outcomes.items()}

    assert not [it for it in picture(audits(skipped=4)).answers if "KV right" in it.question]
    good = picture(audits(equal=5, within_tolerance=2, skipped=4))
    assert "7 hits were audited; all were what" in answer(good, "Is its KV right")
    bad = picture(audits(equal=5, different=1))
    assert "6 hits were audited; not what the model computes: 1 in host" in answer(
        bad, "Is its KV right"
    )
    assert [it.level for it in bad.answers if it.question == "Is its KV right?"] == ["bad"]
    assert (bad.tiers[0].audited, bad.tiers[0].different) == (6, 1)


# -- the window ------------------------------------------------------------------------------------


def test_after_hours_in_which_nobody_looked_the_last_minute_begins_anew() -> None:
    """After a gap in the readings, rates, damage and slowness ignore all earlier readings."""
    damage = 'kvtier_damaged_blocks_total{tier="disk"}'
    quiet = {**guesses(0, 0.0, 0.0), ASKED: 0, damage: 0, **DISK}
    after = {**guesses(9, 9.0, 1.0), ASKED: 90_000, damage: 5, **DISK}
    history = History()
    busy = {**quiet, ASKED: 5000}
    for at_s, values in ((0.0, quiet), (10.0, busy), (28_858.0, after)):
        history.add(reading(at_s, values))
    seen = history.picture()
    assert seen.window_s == 0
    assert "damaged" not in answer(seen, "Why was this slow")
    assert [guess.ratio for guess in seen.guesses] == [None, None]
    assert seen.quiet_s is None
    history.add(reading(28_860.0, after))
    seen = history.picture()
    assert (seen.window_s, seen.tiers[0].damaged_recently) == (2.0, 0.0)
    assert seen.age_s == 28_860.0


@pytest.mark.parametrize(
    "pauses", [[2.0] * 100, [59.0] * 3, [61.0] * 3, [1.0, 95.0, 1.0, 30.0, 70.0]]
)
def test_the_window_is_never_far_beyond_a_minute(pauses: list[float]) -> None:
    history, at_s = History(), 0.0
    for pause in pauses:
        history.add(reading(at_s, {KVTIER: 1}))
        assert history.picture().window_s <= MAX_AGE_S
        at_s += pause


def test_a_server_that_began_anew_while_nobody_looked_is_said_so() -> None:
    history = History()
    history.add(reading(0.0, {KVTIER: 9}))
    history.add(reading(9000.0, {KVTIER: 1}))
    assert history.picture().has_restarted


@pytest.mark.parametrize("ratio", [0.1, 0.56, 1.0, 1.4])
def test_what_took_less_than_expected_is_no_cause(ratio: float) -> None:
    seen = picture(NO_GUESSES, guesses(50, 50 * ratio, 50.0))
    assert [guess.ratio for guess in seen.guesses] == [pytest.approx(ratio)] * 2
    assert answer(seen, "Why was this slow").startswith("Nothing here delays requests")


# -- metrics that no kvtier engine reports ---------------------------------------------------------


@pytest.mark.parametrize("state", [inf, 7, 0.5])
def test_a_breaker_in_no_known_state_is_none_of_ours(state: float) -> None:
    (tier,) = picture({KVTIER: 1, 'kvtier_breaker_state{tier="disk"}': state, **DISK}).tiers
    assert tier.left_alone is None


@pytest.mark.parametrize("le", ['le="many",', "", 'le="-1",', 'le="nan",'])
def test_a_bucket_without_an_end_is_left_out(le: str) -> None:
    values = {
        KVTIER: 1,
        **DISK,
        'kvtier_evicted_blocks_total{tier="disk"}': 100,
        'kvtier_returned_blocks_total{tier="disk"}': 40,
        'kvtier_return_seconds_count{tier="disk"}': 40,
        f'kvtier_return_seconds_bucket{{{le}tier="disk"}}': 30,
        'kvtier_return_seconds_bucket{le="9",tier="disk"}': 40,
    }
    (tier,) = picture(values).tiers
    assert (tier.returned, tier.return_s) == (0.4, 9.0)


def test_a_sample_that_counts_nothing_is_no_division_by_it() -> None:
    gone = {
        'kvtier_evicted_blocks_total{tier="disk"}': 100,
        'kvtier_returned_blocks_total{tier="disk"}': 0,
        'kvtier_return_seconds_count{tier="disk"}': 40,
    }
    (tier,) = picture({KVTIER: 1, **DISK, **gone}).tiers
    assert tier.returned == 0


def test_a_name_is_shown_as_text_in_a_terminal() -> None:
    evil = "[/x][bold]"
    values = {
        KVTIER: 1,
        f'kvtier_slots{{tier="{evil}"}}': 5,
        f'kvtier_copied_bytes_total{{src="{evil}",dst="host"}}': 5,
        f'kvtier_breaker_state{{tier="{evil}"}}': 2,
    }
    shown = io.StringIO()
    seen = ScrapeResult(picture(values).as_json())
    Console(file=shown, width=200).print(draw(seen, "http://h/[/x]"))
    assert shown.getvalue().count(evil) >= 3


def test_a_terminal_tells_bytes_engines_and_a_slab_that_was_cut_short() -> None:
    """The terminal shows capacity in bytes and savings in engines, as the page does."""
    saved, slot_bytes = "kvtier_saved_seconds_total", 'kvtier_slot_bytes{tier="disk"}'
    state = 'kvtier_breaker_state{tier="disk"}'
    values = {KVTIER: 1, **DISK, slot_bytes: 1 << 30, state: 3, saved: 0}
    seen = ScrapeResult(picture(values, {**values, saved: 294.5}, every_s=60.0).as_json())
    shown = io.StringIO()
    Console(file=shown, width=200).print(draw(seen, "http://h"))
    (disk,) = (line for line in shown.getvalue().splitlines() if line.startswith("disk "))
    assert "100 GiB" in disk
    assert "slab cut short" in disk
    assert "prefill time saved 4.91 min (now 4.9 engines)" in shown.getvalue()


QUOTAS = ("memory", "pinned", "floor", "ceiling", "slab", "disk_floor", "disk_ceiling")
NODE: dict[str, object] = {
    "engines": [
        {"name": "pid-2046-89aff5e35107", "tenant": "team-a", "processes": 12, "slots": 98765}
        | {"waiting": 0, "failures": 4, "pauses": 11}
    ],
    "tenants": [
        {"name": "team-a", "engines": 1, "found": None, "used_bytes": {"host": 1 << 40, "disk": 5}}
        | {f"{quota}_bytes": 128 << 20 for quota in QUOTAS}
    ],
    "rooms": [
        {"name": "team-a-e9f974b7a1973c77", "tenant": "team-a", "block_bytes": 320 << 10}
        | {"segments": 1, "used_bytes": {"host": 8_190_000}}
    ],
    "lookup_s": None,
    "lookup_p95_s": None,
    "free_bytes": 1 << 28,
    "memory_bytes": 1 << 28,
}


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_no_word_of_a_table_is_cut_in_a_narrow_terminal(width: int) -> None:
    history = History()
    history.add(recorded("kvtier", 2, 0.0))
    drawn = {**history.picture().as_json(), "node": NODE}
    drawn["tiers"] = [{**tier, "left_alone": 2, "different": 3} for tier in drawn["tiers"]]
    shown = io.StringIO()
    Console(file=shown, width=width).print(draw(ScrapeResult(drawn), "http://h"))
    assert all(len(line.rstrip()) <= width for line in shown.getvalue().splitlines())
    for text in (
        *("evicted/s", "requested", "damaged", "audited", "paused after errors", "3 different"),
        *("processes", "slots", "calls", "pauses", "98.8 k", "segments", "320 KiB"),
        *("memory", "pinned", "ceiling", "slab", "128 MiB", "1 TiB", "pid-2046-89aff5e35107"),
    ):
        assert text in shown.getvalue(), text


@pytest.mark.parametrize(("height", "says_so"), [(12, True), (80, False)])
def test_a_low_terminal_says_that_lines_were_cut(height: int, says_so: bool) -> None:
    history = History()
    history.add(recorded("kvtier", 2, 0.0))
    console = Console(width=100, height=height, file=io.StringIO())
    with console.capture() as shown:
        console.print(Fitted(draw(ScrapeResult(history.picture().as_json()), "http://h")))
    lines = shown.get().rstrip("\n").split("\n")
    assert len(lines) <= height
    assert ("more lines: enlarge the terminal" in lines[-1]) == says_so
