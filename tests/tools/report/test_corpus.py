"""Prompts from text: exact lengths, no overlap, no shared beginning, reproducible."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.errors import ConfigError
from kvtier.tools.report.corpus import Corpus, _library_files, with_other_ending

pytestmark = pytest.mark.engine


def encode(text: str) -> list[int]:
    """Return a token per word: its value if it is a number, else its first character."""
    return [int(word) if word.isdigit() else ord(word[0]) for word in text.split()]


def write(directory: Path, *texts: str) -> list[Path]:
    directory.mkdir(exist_ok=True)
    paths = [directory / f"{number}.txt" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return paths


def numbers(start: int, end: int) -> str:
    return " ".join(
        str(number) + ("\n" if number % 50 == 0 else "") for number in range(start, end)
    )


@given(
    num_prompts=st.integers(1, 8),
    num_tokens=st.integers(1, 200),
    distinct=st.integers(1, 32),
    seed=st.integers(0, 3),
)
def test_prompts_are_disjoint_pieces_of_exact_length(
    tmp_path_factory: pytest.TempPathFactory,
    num_prompts: int,
    num_tokens: int,
    distinct: int,
    seed: int,
) -> None:
    directory = tmp_path_factory.mktemp("text")
    write(directory, numbers(0, 700), numbers(700, 1100), numbers(1100, 1600))
    prompts = Corpus(encode, [directory], seed).prompts(num_prompts, num_tokens, distinct)
    assert [len(prompt) for prompt in prompts] == [num_tokens] * num_prompts
    # Every word of the text is another number, so a repeated token is a place used twice.
    tokens = [token for prompt in prompts for token in prompt]
    assert len(set(tokens)) == len(tokens)


def test_no_two_prompts_share_a_first_block_even_if_the_text_repeats_itself(tmp_path: Path) -> None:
    licence = numbers(0, 40)
    write(tmp_path, *(f"{licence} {numbers(100 * at, 100 * at + 60)}" for at in range(1, 30)))
    prompts = Corpus(encode, [tmp_path]).prompts(10, 50, 8)
    assert len({prompt[:8] for prompt in prompts}) == 10


def test_same_seed_gives_same_prompts_and_another_seed_others(tmp_path: Path) -> None:
    write(tmp_path, *(numbers(1000 * at, 1000 * at + 300) for at in range(10)))

    def prompts(seed: int) -> list[tuple[int, ...]]:
        return Corpus(encode, [tmp_path], seed).prompts(5, 100, 16)

    assert prompts(1) == prompts(1)
    assert prompts(1) != prompts(2)


def test_asking_again_gives_the_same_prompts(tmp_path: Path) -> None:
    write(tmp_path, numbers(0, 3000))
    corpus = Corpus(encode, [tmp_path])
    assert corpus.prompts(3, 100, 16) == corpus.prompts(5, 100, 16)[:3]


def test_too_little_text_is_a_clear_error(tmp_path: Path) -> None:
    path = write(tmp_path, numbers(0, 250))[0]
    with pytest.raises(ConfigError, match=r"250 tokens.* 2 of 3 prompts of 100 tokens.*--text"):
        Corpus(encode, [path]).prompts(3, 100, 16)


def test_a_path_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere is neither a file nor a directory"):
        Corpus(encode, [tmp_path / "nowhere"])


def test_files_that_are_not_text_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, numbers(0, 200))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\xff\xfe")
    (tmp_path / "zeros.bin").write_bytes(bytes(100))
    (tmp_path / ".hidden").write_text(numbers(500, 900))
    (prompt,) = Corpus(encode, [tmp_path]).prompts(1, 200, 16)
    assert sorted(prompt) == list(range(200))


def test_a_tokenizer_is_given_short_pieces_only(tmp_path: Path) -> None:
    lengths = []

    def measure(text: str) -> list[int]:
        lengths.append(len(text))
        return encode(text)

    text = numbers(0, 20_000)
    path = write(tmp_path, text)[0]
    (prompt,) = Corpus(measure, [path]).prompts(1, 20_000, 16)
    assert prompt == tuple(range(20_000))
    assert sum(lengths) == len(text)
    assert max(lengths) <= 4096


def test_the_library_is_the_default_and_its_tests_are_left_out() -> None:
    library = Path(sysconfig.get_path("stdlib"))
    names = {path.relative_to(library).as_posix() for path in _library_files()}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not any("test" in name.split("/") or "site-packages" in name for name in names)
    corpus = Corpus(lambda text: [ord(character) for character in text])
    assert [len(prompt) for prompt in corpus.prompts(3, 2000, 16)] == [2000] * 3
    assert "standard library" in corpus.source


@given(st.integers(1, 99), st.data())
def test_other_ending_shares_exactly_the_beginning(num_shared: int, data: st.DataObject) -> None:
    prompt = tuple(range(100))
    other = tuple(data.draw(st.lists(st.integers(0, 300), min_size=100, max_size=100)))
    if all(token == prompt[num_shared] for token in other[num_shared:]):
        other = (*other[:-1], 999)
    changed = with_other_ending(prompt, num_shared, other)
    assert len(changed) == 100
    assert changed[:num_shared] == prompt[:num_shared]
    assert changed[num_shared] != prompt[num_shared]
