"""The live page in a real browser, over a real server: ``make test-page``."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from kvtier.observe.live.files import LIVE_PATH
from kvtier.observe.live.local import LocalServer
from kvtier.observe.live.scrape import WatchedEngine
from tests.kit.nodes import running
from tests.node.control_harness import BareEngine

from . import browser
from .served import KEY, Serve

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(bool(browser.why_not()), reason=browser.why_not()),
]
PATIENCE_MS = 120_000
WIDTHS = (390, 1280)
HEIGHT = 844
MAX_FOLDED = 1600
"""Longest page on a telephone before anything is unfolded, in pixels."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser.browser() as made:
        yield made


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Serve]:
    made = Serve(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """A server for tests that leave it as it is."""
    made = Serve(tmp_path_factory.mktemp("shared"))
    yield made
    made.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that opens a page. The test fails on any error of the page.

    Errors include script errors, missing files and violations of the content security policy.
    """
    wrong: list[str] = []
    contexts: list[Any] = []

    def opened(url: str, width: int = 1280) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": 900})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if _is_bad(said) else None)
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


def _is_bad(said: Any) -> bool:
    """Whether a console message is an error of the page. An unreachable server is not one."""
    is_away = re.search("ERR_|status of (401|502|503)", said.text)
    return said.type == "error" and not is_away


def wait_for(page: Any, text: str | re.Pattern[str], where: str = "body") -> None:
    page.locator(where).filter(has_text=text).first.wait_for()


def state(page: Any) -> str:
    return str(page.locator("#state").inner_text())


def test_the_page_shows_what_happens_and_goes_on(
    served: Serve, open_page: Callable[..., Any]
) -> None:
    page = open_page(served.url)
    wait_for(page, "Live", "#state")
    wait_for(page, "too few to tell", "#tiles")
    wait_for(page, "Is it worth its memory?", "#answers")
    wait_for(page, "nothing yet", "#charts")
    assert not page.locator("#charts").filter(has_text="10 %").count(), "no axis without a value"
    served.work()
    wait_for(page, re.compile("[1-9]\\d? % of prompt tokens came from the cache"), "#answers")
    wait_for(page, re.compile(r"[1-9]\S* [KM]iB of [1-9]\S* MiB in use"), "#ladder")
    wait_for(page, re.compile(r"device → host [1-9]"), "#charts")
    assert "host" in page.locator("#ladder svg").get_attribute("aria-label")
    wait_for(page, re.compile("load from (host|disk)"), "#guesses")
    wait_for(page, re.compile(r"model kvtier-tiny · kvtier \S+ · up "), "#server")
    found = page.locator("#tiles dd").first.inner_text()
    assert page.locator("#answer-list p").first.inner_text().startswith(f"{found} of prompt"), (
        "one figure"
    )
    assert page.title() == "kvtier-tiny – kvtier"


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_window(
    shared: Serve, open_page: Callable[..., Any], width: int
) -> None:
    page = open_page(shared.url, width)
    shared.work(turns=1)
    wait_for(page, "disk", "#ladder")
    check_width(page, width)
    if width < 640:
        folded = page.evaluate("document.documentElement.scrollHeight")
        assert HEIGHT < folded <= MAX_FOLDED
        assert bottom(page, "#ladder") <= HEIGHT, "the first screen shows how full the tiers are"
        assert not page.locator("#tiers").is_visible()
        unfold(page)
    wait_for(page, "damaged blocks" if width > 640 else "disk", "#tiers")
    check_width(page, width)


def unfold(page: Any) -> None:
    for each in page.locator("summary").all():
        if each.is_visible():
            each.click()


def check_width(page: Any, width: int) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(
        "[...document.querySelectorAll('.scroll, #tiles > div, #ladder')]"
        ".every((each) => each.scrollWidth <= each.clientWidth)"
    ), "nothing is cut off"


def bottom(page: Any, where: str) -> float:
    box = page.locator(where).bounding_box()
    return float(box["y"] + box["height"])


ROUND = re.compile(r"0 (s|B/s|%)|([1245]|[1245]0|[1245]00|8|16|32|64|128|256|512) \S+")
POINTS = "[...document.querySelectorAll('#charts path')].map((each) => each.getAttribute('d'))"
COLOURS = (
    "Object.fromEntries([...document.querySelectorAll('#charts figcaption > span')]"
    ".map((each) => [each.textContent.split(' ').slice(0, 3).join(' ').replace(/ [\\d–].*/, ''),"
    " each.firstChild.className]))"
)


def test_charts_have_round_axes_a_range_and_the_history_before_the_page(
    shared: Serve, open_page: Callable[..., Any]
) -> None:
    first = open_page(shared.url)
    wait_for(first, "Live", "#state")
    shared.work(num_prompts=12)
    wait_for(first, re.compile(r"mean \d.*p95 "), "#charts figcaption")
    axis = first.locator("#charts text[text-anchor=end]").all_text_contents()
    assert [text for text in axis if text != "now" and not ROUND.fullmatch(text)] == []
    first.wait_for_timeout(10_000)  # until the server has kept another value
    later = open_page(shared.url)
    wait_for(later, re.compile(r"mean \d.*p95 "), "#charts figcaption")
    assert later.evaluate(POINTS)[0].count("L") >= 1, "values of before it was opened"
    assert later.evaluate(COLOURS) == first.evaluate(COLOURS)
    for label, text in (("5 min", "5 min ago"), ("hour", "60 min ago")):
        later.locator("#span").select_option(label=label)
        wait_for(later, text, "#charts")


def test_an_engine_and_its_node_are_shown_with_their_names_and_sizes(
    tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    with running(tmp_path, "--control-port=0") as node:
        served = Serve(tmp_path, f"--node={node.socket}", "--engine-name=replica-0")
        try:
            served.work(num_prompts=2)
            page = open_page(node.url)
            wait_for(page, f"replica-0: kvtier-tiny on port {served.port}", "#engines")
            wait_for(page, "1 engine attached", "#answers")
            page = open_page(served.url)
            wait_for(page, re.compile(r"node.* of (7\.\d+|8) MiB", re.DOTALL), "#ladder")
        finally:
            served.close()


def test_the_page_survives_a_restart(served: Serve, open_page: Callable[..., Any]) -> None:
    page = open_page(served.url)
    served.work(turns=1)
    wait_for(page, "Live", "#state")
    served.stop()
    wait_for(page, "No answer: the server does not answer. Retrying.", "#state")
    assert page.locator("#tiers").inner_text() != "", "what was seen last stays"
    served.start()
    wait_for(page, "Live; the server restarted.", "#state")


def test_a_disk_that_goes_away_is_shown_and_that_it_is_back(
    served: Serve, open_page: Callable[..., Any]
) -> None:
    page = open_page(served.url)
    served.work()
    wait_for(page, "in use", "#tiers")
    served.signal(signal.SIGUSR1)
    served.work(8)
    wait_for(page, re.compile("paused after errors|being retried"), "#ladder")
    wait_for(page, "Disk failed", "#answers")
    served.signal(signal.SIGUSR2)
    for _ in range(30):
        served.work(8, 1)
        if state_of_disk(page).endswith("in use"):
            break
    assert state_of_disk(page).endswith("in use")


def test_a_slab_that_is_cut_short_is_said_so_until_it_has_its_length_back(
    served: Serve, open_page: Callable[..., Any], tmp_path: Path
) -> None:
    (slab,) = (tmp_path / "disk").rglob("data.slab")
    length = slab.stat().st_size
    page = open_page(served.url)
    served.work()
    wait_for(page, "in use", "#tiers")
    os.truncate(slab, 4096)
    served.work(8)
    wait_for(page, "slab cut short", "#ladder")
    wait_for(page, "slab cut short", "#tiers")
    wait_for(page, "Find out what cut it, then restart the server", "#answers")
    os.truncate(slab, length)
    page.locator("#ladder").filter(has_text="slab cut short").wait_for(state="detached")
    page.locator("#tiers tr").filter(has_text=re.compile("^disk.*in use$")).wait_for()


def state_of_disk(page: Any) -> str:
    return str(page.locator("#tiers tr", has_text="disk").inner_text())


def test_the_page_is_used_by_keyboard(shared: Serve, open_page: Callable[..., Any]) -> None:
    page = open_page(shared.url)
    wait_for(page, "Live", "#state")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    wait_for(page, "Paused.", "#state")
    page.keyboard.press("Enter")
    wait_for(page, "Live", "#state")
    page.locator("#charts svg").first.focus()
    page.wait_for_timeout(2500)  # some points
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    wait_for(page, re.compile(r", \d+ s ago"), "#charts figcaption")


def test_a_key_is_asked_for_once_and_sent(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    served = Serve(tmp_path, key=KEY)
    try:
        page = open_page(served.url)
        wait_for(page, "Waiting for the API key.", "#state")
        assert page.locator("#main").is_hidden()
        page.locator("#key-text").fill("another")
        page.keyboard.press("Enter")
        wait_for(page, "Wrong API key.", "#state")
        page.locator("#key-text").fill(KEY)
        page.keyboard.press("Enter")
        wait_for(page, "Live", "#state")
        page.reload()
        wait_for(page, "Live", "#state")
    finally:
        served.close()


def test_a_slow_answer_does_not_forget_a_key_that_was_given_since(
    tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    served = Serve(tmp_path, key=KEY)
    held: list[Any] = []

    def hold_without_key(route: Any) -> None:
        if "authorization" in route.request.headers:
            route.continue_()
        else:
            held.append(route)

    try:
        page = open_page(served.url)
        wait_for(page, "Waiting for the API key.", "#state")
        page.route(f"**{LIVE_PATH}*", hold_without_key)
        with page.expect_request(f"**{LIVE_PATH}*"):
            pass
        page.locator("#key-text").fill(KEY)
        page.keyboard.press("Enter")
        wait_for(page, "Live", "#state")
        with page.expect_response(lambda answer: answer.status == 401):
            held[-1].continue_()
        with page.expect_response(lambda answer: answer.ok):
            pass  # with the key, polling goes on
        page.reload()
        wait_for(page, "Live", "#state")
    finally:
        served.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_a_nodes_page_shows_its_engines_and_tenants(
    tmp_path: Path, open_page: Callable[..., Any], width: int
) -> None:
    options = ("--control-port=0", f"--disk-path={tmp_path / 'disk'}", "--disk-capacity=16MiB")
    with (
        running(tmp_path, *options, "--quota=team-a=2MiB:4MiB") as node,
        BareEngine(node, "team-a", "replica-0") as one,
        BareEngine(node, "team-b", "replica-1") as other,
    ):
        one.store(1, 2, 3)
        other.store(4)
        page = open_page(node.said.split(", and ")[1].split("/metrics")[0], width)
        wait_for(page, "2 engines attached", "#answers")
        if width < 640:
            unfold(page)
        wait_for(page, "replica-0", "#engines")
        wait_for(page, re.compile("floor 2 MiB *ceiling 4 MiB"), "#memory")
        wait_for(page, "2 MiB in blocks of 64 KiB", "#memory")
        wait_for(page, re.compile("192 KiB"), "#tenants")
        for _ in range(20):
            one.places(*range(1, 7))
        wait_for(page, "50 %", "#tiles")
        assert page.locator("#plans-section").is_hidden()
        check_width(page, width)


def test_another_engines_page_is_the_same(served: Serve, open_page: Callable[..., Any]) -> None:
    local = LocalServer(WatchedEngine.at(served.url))
    thread = Thread(target=local.serve_forever, args=(0.05,))
    thread.start()
    try:
        page = open_page(local.url)
        served.work(turns=1)
        wait_for(page, "Live", "#state")
        wait_for(page, "disk", "#ladder")
        served.stop()
        wait_for(page, "does not answer", "#state")
    finally:
        local.shutdown()
        thread.join()
        local.server_close()
