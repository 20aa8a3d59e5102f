"""Every block of every page has a language and a mark; every command in one is valid."""

from __future__ import annotations

import re

import pytest

from tests.docs.commands import CommandError, check, check_kvtier, commands
from tests.docs.pages import INDENTED, LANGUAGES, ROOT, Page, PageError, blocks, pages, read_page
from tests.docs.shape import missing_line

INLINE = re.compile(r"`(kvtier [^`]+)`")
each_page = pytest.mark.parametrize("page", pages(), ids=lambda page: page.path)


@each_page
def test_every_block_has_a_language(page: Page) -> None:
    """A block without a language could contain commands that are not checked."""
    for block in page.blocks:
        assert block.language in LANGUAGES, f"{block.where}: ```{block.language}"
    hidden = INDENTED.search(page.prose)
    found = "" if hidden is None else hidden["line"]
    assert not found, f"{page.path}: a block by indentation; fence it: {found}"
    assert page.prose.count("```") == 0, f"{page.path}: a fence that is not closed"


@each_page
def test_every_command_could_be_meant_so(page: Page) -> None:
    for block in page.blocks:
        if block.language == "sh":
            for words in commands(block.text):
                try:
                    check(words)
                except CommandError as error:
                    raise CommandError(f"{block.where}: {error}") from error


@each_page
def test_every_command_within_a_sentence_has_such_options(page: Page) -> None:
    for found in INLINE.findall(page.prose):
        for words in commands(" ".join(found.split())):
            if not {"...", "\N{HORIZONTAL ELLIPSIS}"} & set(words):
                try:
                    check_kvtier(words[1:], partly=True)
                except Exception as error:
                    raise CommandError(f"{page.path}: {found}: {error}") from error


def test_what_is_not_run_says_why_and_what_runs_elsewhere_is_run() -> None:
    for block in blocks():
        marks = block.marks
        if marks.run_by:
            source = (ROOT / marks.run_by).read_text(encoding="utf-8")
            assert "blocks_run_by(" in source, f"{block.where}: {marks.run_by} takes no blocks"
        elif not block.is_run:
            assert len(marks.not_run) > 5, f"{block.where}: what is not here?"


def test_what_is_printed_is_shown_behind_what_is_run() -> None:
    for page in pages():
        before = None
        for block in page.blocks:
            if block.marks.prints:
                assert before is not None, f"{block.where}: printed by whom?"
                assert before.is_run, f"{block.where}: {before.where} is not run"
                assert block.language == "text", block.where
            before = block


PAGE = """
<!-- quick -->
```sh
kvtier doctor
```

Words.

<!-- prints -->
```text
ready after 3 s
```
"""


def test_marks_are_read_and_an_unknown_one_is_refused() -> None:
    page = read_page("page.md", PAGE)
    first, second = page.blocks
    assert (first.line, first.language, first.text) == (3, "sh", "kvtier doctor\n")
    assert first.is_run
    assert first.marks.quick
    assert page.printed_by(first) == second.text
    with pytest.raises(PageError, match="'quik'"):
        read_page("page.md", PAGE.replace("quick", "quik"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("kvtier serve --hostcapacity 1GiB", "No such option"),
        ("kvtier serve --disk-verify never", "is not one of"),
        ("kvtier srve", "no command 'srve'"),
        ("kvtier inspect", "Missing argument"),
        ("kvteir serve", "nobody knows a command 'kvteir'"),
        ("A=1 kvtier bench copy --sizes 3 | head -n 1", "No such option"),
        ("python -m benchmarks.cpy --json -", "no module benchmarks.cpy"),
        ("python -m benchmarks.micro.copy --jsn -", "no option --jsn"),
        ("make demoo", "the Makefile has none"),
        ('pip install ".[s4]"', "no extra s4"),
        ('pip install "kvtier[s3]"', "a release that is not there yet"),
        ("pytest tests/no_such.py", "there is no test"),
        ("vllm serve MODEL --kv-transfer-confg '{}'", "not in the contract with vLLM"),
        (
            """vllm serve MODEL --kv-transfer-config '{"kv_connector_extra_config":
            {"spec_name":"kvtier","host_capcity":"8GiB"}}'""",
            "did you mean 'host_capacity'",
        ),
        ("python -m sglang.launch_server --hicache 1", "not in the contract with SGLang"),
        (
            """python -m sglang.launch_server --hicache-storage-backend-extra-config \\
            '{"disk_pth": "/x"}'""",
            "did you mean 'disk_path'",
        ),
    ],
)
def test_a_command_that_can_not_be_meant_so_is_found(line: str, words: str) -> None:
    (wrong, *_) = commands(line)
    with pytest.raises(CommandError, match=re.escape(words)):
        check(wrong)


def test_commands_are_found_wherever_a_shell_finds_them() -> None:
    script = """
    export A=1 # kvtier none
    X=$(kvtier one --a "b # c") && until kvtier two; do sleep 1; done
    kvtier three \\
      --b 'x
      y' 2>&1 | tee log > out &
    python - <<'EOF'
kvtier no command
EOF
    """
    found = [words for words in commands(script) if words[0] == "kvtier"]
    assert found == [
        ["kvtier", "one", "--a", "b # c"],
        ["kvtier", "two"],
        ["kvtier", "three", "--b", "x\n      y"],
    ]


@pytest.mark.parametrize(
    ("said", "printed", "missing"),
    [
        ("ready after 3 s", "noise\nready after 1,200 ms\nnoise", None),
        ("\N{BOX DRAWINGS LIGHT VERTICAL} a  3 KiB", "| a 4.5 GiB |", None),
        ("a\n...\nc", "a\nb\nc", None),
        ("on ... at http://127.0.0.1:8000", "on cpu, slow at http://127.0.0.1:4711", None),
        ("a\nb", "b\na", "b"),
        ("3 blocks", "3 block", "3 blocks"),
        ("ready", "not ready", "ready"),
    ],
)
def test_output_is_compared_by_its_shape(said: str, printed: str, missing: str | None) -> None:
    assert missing_line(said, printed) == missing
