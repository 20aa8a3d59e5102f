"""The HTML report: complete, self-contained, and readable without its pictures."""

from __future__ import annotations

import re

import pytest

from kvtier.tools.bench_serve.report import render_report
from tests.kit.outline import outline
from tests.tools.bench_serve import samples

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def html() -> str:
    return render_report(
        samples.serve_result(samples.accuracy(unequal=1), samples.ttft(), samples.overhead())
    )


def test_report_is_well_formed_with_names_used_once(html: str) -> None:
    found = outline(html)
    assert len(found.ids) == len(set(found.ids))


def test_report_needs_nothing_from_outside(html: str) -> None:
    assert all(link.startswith("#") for link in outline(html).links)
    assert "@import" not in html
    assert "<script" not in html
    assert not re.search(r"url\((?!#)", html)


def test_report_says_the_figures_in_words(html: str) -> None:
    text = " ".join(outline(html).text).replace("\u00a0", " ")
    for figure in (
        "The first token came 96.5 % sooner.",
        "1,000 ms",
        "\u221297.5 %",
        "691,200 of 700,000 prompt tokens",
        "20 of 20",
        "19 of 20",
        "first token +0.4 % (+0.1 % to +0.7 %)",
        "kvtier bench serve",
        "A processor <with brackets>",
    ):
        assert figure in text


def test_pictures_take_their_colours_from_the_page(html: str) -> None:
    assert html.count("<svg") == 6
    assert "#10100" not in html
    for variable in ("--ink", "--device", "--host", "--cold", "--line"):
        assert f"var({variable})" in html
        assert html.count(f"{variable}:") == 2  # once for light mode, once for dark mode


@pytest.mark.parametrize("part", ["accuracy", "ttft", "overhead", "slow_disk", "overlap", "store"])
def test_one_experiment_alone_makes_a_report(part: str) -> None:
    made = getattr(samples, part)()
    html = render_report(samples.serve_result(**{part: made}))
    outline(html)
    assert html.count("<svg") == {"ttft": 4, "overhead": 2}.get(part, 0)


@pytest.mark.parametrize("with_ttft", [True, False])
def test_store_is_a_tier_of_its_own(with_ttft: bool) -> None:
    ttft = samples.ttft() if with_ttft else None
    html = render_report(samples.serve_result(ttft=ttft, store=samples.store()))
    text = " ".join(outline(html).text).replace("\u00a0", " ")
    for words in (
        "From the store",
        "50 ms",
        "\u221295.",
        "20 of 20 prompts, 200 MiB",
        "a look-up took 1.5 ms",
    ):
        assert words in text
    assert 'class="fill store"' in html
    assert html.index('class="fill cold"') < html.index('class="fill store"')
