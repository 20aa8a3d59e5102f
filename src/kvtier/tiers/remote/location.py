"""Location of a store and its options: ``scheme://user:password@host:port/path?option=value``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvtier.config import parse_size
from kvtier.errors import ConfigError

SECRET: Final = "KVTIER_STORE_SECRET"
"""Environment variable: what all processes that share a store know, and nobody else; it tags
blocks."""
AUTHORITY: Final = re.compile(r"//[^/?#]*")
"""Pattern of the authority of a URL: user, password, host and port."""
HOST: Final = re.compile(r"[^\s%@/\\]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Options of every store, behind the ``?``. A store's own class adds to them."""

    readers: int = 4
    """Calls that read at a time."""
    writers: int = 2
    """Calls that write at a time."""
    bytes_per_s: int = 0
    """The most that is moved each way; 0 for no limit. Like "1GiB"."""
    request_s: float = 0.0
    """Latency of a request beside its bytes, in seconds, until it is measured."""
    secret_file: str = ""
    """A file with the secret that tags blocks; else what ``KVTIER_STORE_SECRET`` says."""

    def secret(self) -> bytes:
        """b"" for none. Raises ``ConfigError`` for a file that can't be read."""
        if not self.secret_file:
            return os.environ.get(SECRET, "").encode()
        try:
            found = Path(self.secret_file).expanduser().read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"secret_file: {self.secret_file}: {error.strerror}") from error
        if not found:
            raise ConfigError(f"secret_file: {self.secret_file} is empty; put a secret into it")
        return found


@dataclass(frozen=True, slots=True)
class Location:
    """Parts of a store's URL.

    user, password: None if absent; neither is ever shown. path: without the first slash. given:
    options, as they were written.
    """

    scheme: str
    host: str
    port: int | None
    path: str
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    given: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        """For people and logs: without what is secret."""
        port = f":{self.port}" if self.port is not None else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        path = f"/{self.path}" if self.path else ""
        return f"{self.scheme}://{host}{port}{path}"


def read_location(scheme: str, rest: str) -> Location:
    """Read what stands behind the colon of a URL.

    Raises:
        ConfigError: ``rest`` is no URL. The message repeats nothing of it: a password with a sign
            that was not percent-encoded may stand anywhere.
    """
    if not rest.startswith("//"):
        raise ConfigError(f'storage: {scheme}: no place; write it as "{scheme}://host"')
    authority = AUTHORITY.match(rest)
    behind = rest[authority.end() :] if authority else ""
    if "#" in rest or "@" in behind:
        raise ConfigError(
            f"storage: {scheme}: credentials do not belong into a path or an option, and no # is "
            "read; write an @ behind the server as %40, a # as %23, and all signs of a password "
            "that are no letters or digits percent-encoded"
        )
    parts = _split(f"{scheme}:{rest}")
    if parts is None:
        raise ConfigError(
            f'storage: {scheme}: is no URL; write it as "{scheme}://user:password@host:port", with '
            "a number for the port, and signs of a password percent-encoded"
        )
    given: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in given:
            raise ConfigError(f"storage: {scheme}: an option is given twice")
        given[name] = value
    return Location(
        scheme,
        parts.hostname or "",
        parts.port,
        unquote(parts.path).strip("/"),
        _unquoted(parts.username),
        _unquoted(parts.password),
        given,
    )


def _split(url: str) -> SplitResult | None:
    """Return the parts of a URL; None where it is none, or its host can't be one.

    The parser's own error, which quotes the URL, goes no further.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
        host.encode("idna")
    except ValueError:
        return None
    return parts if url.isprintable() and HOST.fullmatch(host) else None


def _unquoted(text: str | None) -> str | None:
    """Return a name or a password, whose bytes need not be UTF-8."""
    return None if text is None else unquote(text, errors="surrogateescape")


Options = TypeVar("Options", bound=StoreOptions)


def _whether(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


READERS: Mapping[str, Callable[[str], object]] = {
    "int": lambda text: parse_size(text, "") if not text.isdecimal() else int(text),
    "float": float,
    "str": str,
    "bool": _whether,
}
HINTS: Final = {
    "int": 'a number, or a size such as "1GiB"',
    "float": "a number",
    "bool": "true or false",
}


def read_options(kind: type[Options], location: Location) -> Options:
    """The options of a URL.

    Raises ``ConfigError`` for one that nobody knows, and for a value that can't be read or is below
    zero.
    """
    known = {each.name: str(each.type) for each in fields(kind)}
    values: dict[str, object] = {}
    for name, text in location.given.items():
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"storage: {location}: no option is called {name!r}; {hint}")
        try:
            value = READERS[known[name]](text)
            if isinstance(value, int | float) and not 0 <= value < float("inf"):
                raise ValueError(value)
        except (ValueError, ConfigError):
            raise ConfigError(
                f"storage: {location}: {name}={text!r}; write {HINTS[known[name]]}"
            ) from None
        values[name] = value
    options = kind(**values)  # type: ignore[arg-type]
    if min(options.readers, options.writers) < 1:
        raise ConfigError(f"storage: {location}: readers and writers are 1 at least")
    return options
