"""Models of the Hugging Face hub, by ``huggingface_hub``. Imports no torch.

The cache, the mirror, the token and offline mode are its own: ``HF_HOME``, ``HF_ENDPOINT``,
``HF_TOKEN``, ``HF_HUB_OFFLINE``.
"""

from __future__ import annotations

import errno
import logging
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from http import HTTPStatus
from pathlib import Path

from kvtier.core.errors import ConfigError, install_command, printable

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)

WEIGHTS = ("*.safetensors",)
PICKLED_WEIGHTS = ("pytorch_model*.bin",)
"""Weights that are only needed where there are no ``WEIGHTS``."""
OTHER_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
"""Configuration and tokenizer."""
LEFT_OUT = ("*/*", "consolidated*", "*.fp16.safetensors")
"""Files of other programs, and weights that are there twice."""

ANSWER_S = 30.0
"""Longest wait for the hub's list of a model's files."""

MAX_REASON = 300
"""Most characters of a library's own message."""


def is_hub_name(name: str) -> bool:
    """Whether ``name`` has the form OWNER/NAME."""
    return _NAME.fullmatch(name) is not None and not name.startswith(".")


def download(name: str, revision: str = "") -> Path:
    """Return the local directory of a model of the hub; files that are missing are downloaded.

    Args:
        name: OWNER/NAME.
        revision: a branch, a tag or a commit; "" for the main branch.

    Raises:
        ConfigError: the hub does not have the model, gives no access to it or does not answer, and
            the model is not in the cache either; or the cache can't be written.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(
            f"model: {name!r} is a name of the Hugging Face hub, which needs huggingface_hub; "
            f"install it: {install_command('engine')}"
        ) from None
    try:
        commit, sizes = _files(name, revision)
    except Exception as error:  # any type: huggingface_hub passes on errors of its HTTP client
        return _cached(name, revision, error)
    wanted = _wanted(sizes)
    missing_bytes = _missing_bytes(name, commit, {file: sizes[file] for file in wanted})
    if missing_bytes:
        logger.info(
            "downloading model=%s revision=%s files=%d bytes=%d",
            name,
            commit,
            len(wanted),
            missing_bytes,
        )
    try:
        with _progress_bars(missing_bytes > 0 and sys.stderr.isatty()):
            found = Path(snapshot_download(name, revision=revision or None, allow_patterns=wanted))
    except Exception as error:  # any type, as above
        raise ConfigError(f"model: {_reason(name, revision, error)}") from error
    logger.info("model of the hub model=%s revision=%s", name, found.name)
    return found


def _files(name: str, revision: str) -> tuple[str, dict[str, int]]:
    """Return the commit of a revision, and the sizes of its files by name."""
    from huggingface_hub import HfApi

    found = HfApi().model_info(
        name, revision=revision or None, files_metadata=True, timeout=ANSWER_S
    )
    return str(found.sha), {each.rfilename: each.size or 0 for each in found.siblings or []}


def _wanted(sizes: Mapping[str, int]) -> list[str]:
    """Return the files that the engine reads, of all files of a model."""

    def matching(patterns: Sequence[str]) -> set[str]:
        return {file for file in sizes if any(fnmatch(file, pattern) for pattern in patterns)}

    left_out = matching(LEFT_OUT)
    weights = matching(WEIGHTS) - left_out or matching(PICKLED_WEIGHTS)
    return sorted((weights | matching(OTHER_FILES)) - left_out)


def _missing_bytes(name: str, commit: str, sizes: Mapping[str, int]) -> int:
    """Return how much is to be downloaded.

    Raises ``ConfigError`` if the disk of the cache has less space.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    missing_bytes = sum(
        size
        for file, size in sizes.items()
        if not isinstance(try_to_load_from_cache(name, file, revision=commit), str)
    )
    cache = Path(constants.HF_HUB_CACHE).expanduser()
    existing = next((folder for folder in (cache, *cache.parents) if folder.exists()), cache)
    left_bytes = shutil.disk_usage(existing).free
    if missing_bytes > left_bytes:
        raise ConfigError(
            f"model: {name!r} needs {missing_bytes / 2**30:.1f} GiB, and {cache} has "
            f"{left_bytes / 2**30:.1f} GiB left; free some, or set HF_HOME to a folder on a larger "
            "disk"
        )
    return missing_bytes


def _cached(name: str, revision: str, error: Exception) -> Path:
    """Return the directory of a model in the cache, if the hub failed with ``error``.

    Raises ``ConfigError`` with the reason if it is not there as a whole.
    """
    from huggingface_hub import snapshot_download

    try:
        found = Path(
            snapshot_download(
                name,
                revision=revision or None,
                allow_patterns=[*WEIGHTS, *OTHER_FILES],
                ignore_patterns=list(LEFT_OUT),
                local_files_only=True,
            )
        )
    except (OSError, ValueError):
        raise ConfigError(f"model: {_reason(name, revision, error)}") from error
    logger.info("model of the cache model=%s revision=%s", name, found.name)
    return found


@contextmanager
def _progress_bars(is_wanted: bool) -> Iterator[None]:
    """Have huggingface_hub show its progress, or not; transformers changes the same switch."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None:  # the user decides
        yield
        return
    was_disabled = are_progress_bars_disabled()
    switches = {True: enable_progress_bars, False: disable_progress_bars}
    switches[is_wanted]()
    try:
        yield
    finally:
        switches[not was_disabled]()


def _reason(name: str, revision: str, error: Exception) -> str:
    """Return why a model is not to be had, in one sentence."""
    from huggingface_hub import constants, errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return (
            f"{name!r} is not in the cache {constants.HF_HUB_CACHE}, or not all of it, and "
            "HF_HUB_OFFLINE forbids to download it; unset that, or give a local directory"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name!r} has no revision {revision!r} on {constants.ENDPOINT}; see its branches"
    if isinstance(error, errors.GatedRepoError) or status == HTTPStatus.FORBIDDEN:
        return (
            f"{constants.ENDPOINT} gives no access to {name!r}; accept its terms on its page, and "
            "set HF_TOKEN to a token that may read it"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{name!r} is neither a local directory nor a model on {constants.ENDPOINT} that can "
            "be read without more rights; check the name, or set HF_TOKEN if it is private"
        )
    if status == HTTPStatus.UNAUTHORIZED:
        return f"{constants.ENDPOINT} does not accept the token in HF_TOKEN; give a valid one"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return (
            f"the disk of {constants.HF_HUB_CACHE} was full before {name!r} was downloaded; free "
            "some space, or set HF_HOME to a folder on a larger disk"
        )
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return (
            f"{printable(str(error.filename))} can't be written ({error.strerror}); set HF_HOME to "
            "a folder for downloaded models"
        )
    first_line = printable(str(error).strip().partition("\n")[0])[:MAX_REASON].rstrip(".")
    return (
        f"{name!r} can't be downloaded from {constants.ENDPOINT} "
        f"({type(error).__name__}: {first_line}), and is not in the cache; try again, or give a "
        "local directory"
    )
