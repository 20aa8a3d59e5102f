"""Identifies the loaded weights: from memory, or by reading them while they are loaded.

begin()   notes the files' stamps before the weights are loaded; recalls or begins to read
settle()  returns the identity of the loaded weights; waits for the reading
check()   reads in the background what was only recalled
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from secrets import token_hex
from threading import Event, Thread

from blake3 import blake3

from kvtier.identity.content import Stopped, hash_files, num_threads
from kvtier.identity.files import Files, Stamp, model_files, telling
from kvtier.identity.memory import WeightsMemory

logger = logging.getLogger(__name__)

SMALL_FILE_BYTES = 1 << 20
"""Smaller files are always read: configurations and code."""
SMALL_MODEL_BYTES = 1 << 30
"""A smaller model is read in a fraction of a second, and never remembered."""
NUM_POLITE_THREADS = 2
"""Threads for reading in the background."""


class Basis(Enum):
    """Evidence for an identity."""

    READ = "read"
    """This process has read all bytes."""
    REMEMBERED = "remembered"
    """The files have the same stamps as when all bytes were read."""
    GIVEN = "given"
    """The user gave the identity."""
    UNKNOWN = "unknown"
    """The loaded weights cannot be determined: the name is unique to this process."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a model's weights.

    digest: hex; equal for equal weights, configuration and code.
    """

    digest: str
    basis: Basis


def unknown(reason: str) -> Identity:
    """Return an identity that no other process can have."""
    logger.warning("KV is not found by later processes: %s", reason)
    return Identity(f"unknown {token_hex(16)}", Basis.UNKNOWN)


class Identification:
    """Identification of the weights at ``models``: folders or files that are used together.

    memory: None for none.
    since_ns: for callers that start after the loading: files that changed later than this may
    differ from what was loaded.
    small_bytes: a model of up to this size is always read.
    name: of what it is, for messages.
    One thread calls ``begin`` and ``settle``; ``read`` runs on any thread, one call at a time.
    """

    def __init__(
        self,
        models: Sequence[Path],
        memory: WeightsMemory | None = None,
        since_ns: int | None = None,
        small_bytes: int = SMALL_MODEL_BYTES,
        name: str = "the model",
    ) -> None:
        self._models = tuple(Path(os.path.realpath(model)) for model in models)
        self._key = "\0".join(map(str, self._models))
        self._memory = memory
        self._since_ns = since_ns
        self._small_bytes = small_bytes
        self._name = name
        self._known: Identity | None = None
        self._read: Identity | None = None
        self._reader: Thread | None = None
        self._stop = Event()
        self._files: Files = {}
        self._trouble = ""
        try:
            self._files = self._look()
        except OSError as error:
            self._trouble = f"files of {self._name} can't be read ({error})"

    @property
    def num_bytes(self) -> int:
        """Total size of the relevant files."""
        return sum(stamp.size for stamp in self._files.values() if stamp is not None)

    @property
    def newest_ns(self) -> int:
        """When the last of the files changed, in ns since 1970."""
        stamps = (stamp for stamp in self._files.values() if stamp is not None)
        return max((stamp.changed_ns for stamp in stamps), default=0)

    @property
    def is_small(self) -> bool:
        """Whether the model is read quickly and not remembered."""
        return self.num_bytes <= self._small_bytes

    def begin(self) -> None:
        """Recall the identity, or begin to read the files in the background."""
        self._known = self._recall()
        if self._known is None:
            self._reader = Thread(target=self.read, name="kvtier-weights", daemon=True)
            self._reader.start()

    def settle(self) -> Identity:
        """Return the identity of what was loaded since ``begin``; waits for the reading to end."""
        if self._reader is not None:
            self._reader.join()
            self._reader = None
        found = self._known or self._read
        assert found is not None, "settle comes after begin"
        if found.basis is not Basis.UNKNOWN and not self._is_as_it_was():
            found = self._known = unknown(f"files of {self._name} changed while they were loaded")
        return found

    def check(self, then: Callable[[Identity], None]) -> None:
        """Read all bytes in the background, and call ``then`` on that thread; not after ``stop``.

        If the digest differs from the remembered one, that is forgotten and the result is unknown:
        the files have the same stamps but other content, so it is uncertain what was loaded.
        """

        def read() -> None:
            found = self.read(NUM_POLITE_THREADS, is_polite=True)
            if not self._stop.is_set():
                then(found)

        self._reader = Thread(target=read, name="kvtier-weights", daemon=True)
        self._reader.start()

    def stop(self) -> None:
        """Cancel the reading, and wait for its threads."""
        self._stop.set()
        if self._reader is not None:
            self._reader.join()

    def read(self, threads: int | None = None, is_polite: bool = False) -> Identity:
        """Read all bytes and return the identity; unknown if the files changed in the meantime."""
        self._read = self._identify(threads or num_threads(), is_polite)
        return self._read

    # -- reading -----------------------------------------------------------------------------------

    def _look(self) -> Files:
        return {path: stamp for model in self._models for path, stamp in model_files(model).items()}

    def is_still(self, models: Sequence[Path]) -> bool:
        """Return whether ``models`` are the files of this identification, and look the same."""
        same = tuple(Path(os.path.realpath(model)) for model in models) == self._models
        return same and self._is_as_it_was()

    def _is_as_it_was(self) -> bool:
        try:
            return self._look() == self._files
        except OSError:
            return False

    def _identify(self, threads: int, is_polite: bool) -> Identity:
        if self._trouble:
            return unknown(self._trouble)
        began_ns = time.time_ns()
        paths = [path for path, stamp in self._files.items() if stamp is not None]
        try:
            digests = hash_files(paths, threads, self._stop, is_polite)
        except OSError as error:
            return unknown(f"files of {self._name} can't be read ({error})")
        except Stopped:
            return Identity("", Basis.UNKNOWN)
        if not self._is_as_it_was():
            return unknown(f"files of {self._name} changed while they were loaded")
        stamps = {path: stamp for path, stamp in self._files.items() if stamp is not None}
        if self._since_ns is not None and self.newest_ns > self._since_ns:
            return unknown(f"files of {self._name} changed after this process began")
        held = dict(zip(paths, (digest.hex() for digest in digests), strict=True))
        found = Identity(self._digest(held), Basis.READ)
        if self._known is not None and self._known.digest != found.digest:
            if self._memory is not None:
                self._memory.forget(self._key)
            return unknown(f"files of {self._name} are others than they were, and look the same")
        self._remember(stamps, held, began_ns)
        return found

    def _digest(self, held: dict[Path, str]) -> str:
        """Return the digest of all files: their names below each model, and their contents.

        A dangling link counts with its name only.
        """
        hasher = blake3()
        for model in self._models:
            for path in self._files:
                if path != model and path.parent != model:
                    continue
                name = "" if path == model else path.name
                for piece in (name, held.get(path, "")):
                    hasher.update(len(os.fsencode(piece)).to_bytes(8, "little"))
                    hasher.update(os.fsencode(piece))
            hasher.update(b"\xff" * 8)  # not a valid length: marks the next model
        return hasher.hexdigest()

    # -- memory ------------------------------------------------------------------------------------

    def _recall(self) -> Identity | None:
        """Return the identity from memory and from the bytes of the small files, if possible."""
        if self._memory is None or self._trouble or self.is_small:
            return None
        records = self._memory.recall(self._key)
        held: dict[Path, str] = {}
        for path, stamp in self._large().items():
            seen, digest = records.get(str(path), (None, ""))
            if seen != stamp or not isinstance(digest, str):
                return None
            held[path] = digest
        small = [path for path, stamp in self._files.items() if stamp and path not in held]
        try:
            digests = hash_files(small, 1, self._stop)
        except OSError:
            return None
        held.update(zip(small, (digest.hex() for digest in digests), strict=True))
        return Identity(self._digest(held), Basis.REMEMBERED)

    def _remember(self, stamps: dict[Path, Stamp], held: dict[Path, str], began_ns: int) -> None:
        large = self._large()
        if self._memory is None or self.is_small or not large:
            return
        names = {str(path): stamp for path, stamp in large.items()}
        if telling(names, began_ns) == names.keys():
            self._memory.remember(
                self._key, {str(path): (stamps[path], held[path]) for path in large}
            )

    def _large(self) -> dict[Path, Stamp]:
        return {
            path: stamp
            for path, stamp in self._files.items()
            if stamp is not None and stamp.size > SMALL_FILE_BYTES
        }
