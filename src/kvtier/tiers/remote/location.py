"""Location of a store and its options: ``scheme://user:password@host:port/path?option=value``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Final, Generic, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvtier.core.config import parse_size
from kvtier.core.errors import ConfigError
from kvtier.core.system.user_paths import user_path
from kvtier.tiers.storage import StorageSite, StorageTier
from kvtier.tiers.wrappers import ThrottledTier

SECRET: Final = "KVTIER_STORE_SECRET"
"""Environment variable with the secret for tags, shared by all processes that use a store."""
AUTHORITY: Final = re.compile(r"//[^/?#]*")
"""Pattern of the authority of a URL: user, password, host and port."""
HOST: Final = re.compile(r"[^\s%@/\\]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Options of every store, behind the ``?``. A store's own class adds to them."""

    readers: int = 4
    """Concurrent read calls."""
    writers: int = 2
    """Concurrent write calls."""
    bytes_per_s: int = 0
    """Bandwidth limit per direction; 0 for no limit. Like "1GiB"."""
    request_s: float = 0.0
    """Latency of a request without its bytes, in seconds, until it is measured."""
    secret_file: str = ""
    """File with the secret that tags blocks. Default: the value of ``KVTIER_STORE_SECRET``. White
    space around either does not count."""

    def secret(self) -> bytes:
        """Return the secret; b"" for none. Raises ``ConfigError`` for an unreadable file."""
        if not self.secret_file:
            return os.environ.get(SECRET, "").strip().encode()
        try:
            found = user_path(self.secret_file).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"secret_file: {self.secret_file}: {error.strerror}") from error
        if not found:
            raise ConfigError(f"secret_file: {self.secret_file} is empty; put a secret into it")
        return found


@dataclass(frozen=True, slots=True)
class Location:
    """Parts of a store's URL.

    user, password: None if absent; never shown.
    path: without the leading slash.
    given: options as written.
    """

    scheme: str
    host: str
    port: int | None
    path: str
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    given: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        """Return the URL without user, password and options."""
        port = f":{self.port}" if self.port is not None else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        path = f"/{self.path}" if self.path else ""
        return f"{self.scheme}://{host}{port}{path}"


def read_location(scheme: str, rest: str) -> Location:
    """Parse the part of a URL behind the scheme's colon.

    Raises:
        ConfigError: ``rest`` is not a URL. The message quotes nothing of it, because an unencoded
            password may be anywhere in it.
    """
    if not rest.startswith("//"):
        example = "/mnt/shared/kv" if scheme == "dir" else "host"
        raise ConfigError(f'storage: {scheme}: no place; write it as "{scheme}://{example}"')
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
    """Return the parts of a URL; None if it is invalid or its host is.

    The parser's own error is dropped, because it quotes the URL.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
        host.encode("idna")
    except ValueError:
        return None
    return parts if url.isprintable() and HOST.fullmatch(host) else None


def _unquoted(text: str | None) -> str | None:
    """Return a decoded name or password, whose bytes need not be UTF-8."""
    return None if text is None else unquote(text, errors="surrogateescape")


Options = TypeVar("Options", bound=StoreOptions)
SETTINGS: Final = ("codec", "encryption_key")
"""Settings of the cache, which an option of a URL can't replace."""


def _accept(location: Location, options: StoreOptions) -> None:
    del location, options


class StorePlugin(Generic[Options]):
    """Plug-in of ``kvtier.tiers`` for the stores of one scheme.

    scheme: as ``Location`` shows it.
    options: class of the options of a URL.
    make: makes the tier.
    check: raises ``ConfigError`` for a URL that can't be used. It reaches no store.
    """

    def __init__(
        self,
        scheme: str,
        options: type[Options],
        make: Callable[[StorageSite, Location, Options], StorageTier],
        check: Callable[[Location, Options], object] = _accept,
    ) -> None:
        self._scheme = scheme
        self._options = options
        self._make = make
        self._check = check

    def read(self, rest: str) -> tuple[Location, Options]:
        """Return the location and the options of a URL, without its scheme.

        Raises ``ConfigError`` for a URL that can't be used. It needs neither the store nor its
        client, so a program can call it before it begins anything.
        """
        location = read_location(self._scheme, rest)
        options = read_options(self._options, location)
        self._check(location, options)
        return location, options

    def __call__(self, site: StorageSite) -> StorageTier:
        location, options = self.read(site.location)
        tier = self._make(site, location, options)
        return ThrottledTier(tier, options.bytes_per_s) if options.bytes_per_s else tier


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
    """Return the options of a URL.

    Raises ``ConfigError`` for an unknown option, and for a value that cannot be parsed or is
    negative.
    """
    known = {each.name: str(each.type) for each in fields(kind)}
    values: dict[str, object] = {}
    for name, text in location.given.items():
        if name in SETTINGS:
            raise ConfigError(
                f"storage: {location}: {name!r} is no option of a store; give it as the setting "
                f"{name!r}, or --{name.replace('_', '-')} on the command line"
            )
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
