"""Objects in a bucket, and errors whose messages contain no secrets."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import urlsplit

from kvtier.core.errors import ConfigError, install_command

try:
    import obstore
    from obstore.exceptions import (
        AlreadyExistsError,
        BaseError,
        PermissionDeniedError,
        PreconditionError,
        UnauthenticatedError,
    )
    from obstore.store import S3Store
except ImportError as error:
    if error.name != "obstore":
        raise
    raise ConfigError(
        f"storage: s3: needs the package obstore; install it: {install_command('s3')}"
    ) from error

from kvtier.core.system.hosts import is_local
from kvtier.tiers.remote.errors import Refused, Unreachable, Unsound
from kvtier.tiers.remote.location import Location
from kvtier.tiers.remote.s3.manifests import MAX_BYTES
from kvtier.tiers.remote.s3.opening import S3Options, endpoint_of

if TYPE_CHECKING:
    from obstore import ListStream, ObjectMeta
    from obstore.store import ClientConfig

Result = TypeVar("Result")

CONNECT_S: Final = 2.0
REQUEST_S: Final = 120.0
"""Time limit of requests that nothing waits for; callers end theirs earlier."""
PAGE: Final = 1000
"""Entries of a list that are read at a time."""
MAX_LISTED: Final = 1 << 24
"""Limit of the entries of one list."""
NUM_RETRIES: Final = 2
RETRY_S: Final = 5.0
PROBE_PATH: Final = "self-test/probe"
"""Object of the self-test, shared by all processes; its content never changes."""
PROBE: Final = bytes(range(64))
WRONG_SETTINGS: Final = frozenset(
    {
        "AccessDenied",
        "AccountProblem",
        "AllAccessDisabled",
        "AuthorizationHeaderMalformed",
        "ExpiredToken",
        "IllegalLocationConstraintException",
        "InvalidAccessKeyId",
        "InvalidBucketName",
        "InvalidToken",
        "NoSuchBucket",
        "PermanentRedirect",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
"""S3 error codes that retries cannot fix."""
REDIRECT: Final = "PermanentRedirect"
WRONG_REGION: Final = frozenset(
    {REDIRECT, "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
)
"""Those that a bucket of another region is answered with."""


class Missing(Exception):  # noqa: N818 - an outcome
    """The object, or the requested version of it, does not exist."""


class Taken(Exception):  # noqa: N818 - an outcome
    """The object exists already."""


@dataclass(frozen=True, slots=True)
class Listed:
    """An object in a listing. written_s: unix time by the store's clock."""

    path: str
    num_bytes: int
    written_s: float


class Objects:
    """Objects below a prefix.

    All calls raise only ``Missing``, ``Taken``, ``Refused``, ``Unreachable`` or ``Unsound``. Of the
    server's response, their messages contain only the error code.

    Credentials come from the environment or the machine's role. Requests are signed unless
    ``AWS_SKIP_SIGNATURE`` is set.

    Raises ``ConfigError`` for settings that the client refuses.
    """

    def __init__(self, location: Location, options: S3Options) -> None:
        try:
            self._store = _open_store(location, options)
        except Exception as error:
            raise ConfigError(
                f"storage: {location}: the client refuses its settings ({type(error).__name__}); "
                "see the environment's AWS_ variables"
            ) from None

    async def put(self, path: str, content: object, create: bool = False) -> None:
        """Write an object. create: raise ``Taken`` if it exists."""
        put = obstore.put_async(
            self._store,
            path,
            content,  # type: ignore[arg-type]
            mode="create" if create else "overwrite",
            use_multipart=False,
        )
        await _asked(put)

    async def get(self, path: str) -> bytes:
        """Return a whole, small object."""
        found = await _asked(obstore.get_async(self._store, path))
        if found.meta["size"] > MAX_BYTES:
            raise Refused("it is too large")
        return bytes(await _asked(found.bytes_async()))

    async def part(self, path: str, start: int, end: int) -> memoryview:
        """Return a range of bytes of an object, cut at its end."""
        return memoryview(
            await _asked(obstore.get_range_async(self._store, path, start=start, end=end))
        )

    async def listed(self, path: str) -> list[Listed]:
        """Return the objects below ``path``; a list that does not end is ``Unreachable``."""
        pages = obstore.list(self._store, path, chunk_size=PAGE)
        return [
            Listed(each["path"], each["size"], each["last_modified"].timestamp())
            for each in await _asked(_whole(pages))
        ]

    async def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; missing ones are ignored."""
        if paths:
            await _asked(obstore.delete_async(self._store, list(paths)))

    async def self_test(self) -> float:
        """Test that the store behaves as packs and manifests require.

        Lists first, so that a missing bucket is reported by its name.

        Returns the seconds of one request. Raises ``Unsound`` if the store cannot be relied on.
        """
        await self.listed("self-test")
        await self._create_probe()
        if await self._create_probe():
            raise Unsound(
                "it writes over an object that was only to be created: it ignores If-None-Match"
            )
        for _ in range(2):  # the second one has a connection
            began = time.monotonic()
            if await self.part(PROBE_PATH, 8, 24) != PROBE[8:24]:
                raise Unsound("it answers a request for a part of an object with something else")
        return time.monotonic() - began

    async def _create_probe(self) -> bool:
        """Create the probe. Return whether it was created now."""
        try:
            await self.put(PROBE_PATH, PROBE, create=True)
        except Taken:
            return False
        return True


def _open_store(location: Location, options: S3Options) -> S3Store:
    endpoint = endpoint_of(options)
    # Under both names: the second one takes precedence over the environment.
    where = dict.fromkeys(("endpoint", "aws_endpoint_url_s3"), endpoint) if endpoint else {}
    where |= {"region": options.region} if options.region else {}
    host = urlsplit(endpoint).hostname or ""
    # Without a proxy of its own the client uses that of the environment, which can't reach a
    # server on this machine. This one is used for no request.
    no_proxy: ClientConfig = {"proxy_url": endpoint, "proxy_excludes": host}
    return S3Store(
        location.host,
        prefix=location.path or None,
        # Blocks need no signature: they have checksums and optional tags of their own.
        unsigned_payload=not options.sign_payload,
        client_options={
            "allow_http": endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=CONNECT_S),
            "timeout": timedelta(seconds=REQUEST_S),
            **(no_proxy if is_local(host) else {}),
        },
        retry_config={
            "max_retries": NUM_RETRIES,
            "retry_timeout": timedelta(seconds=RETRY_S),
            "backoff": {"init_backoff": timedelta(milliseconds=50)},
        },
        **where,  # type: ignore[arg-type]
    )


async def _whole(pages: ListStream[Sequence[ObjectMeta]]) -> list[ObjectMeta]:
    """Return all entries of a list.

    The client requests pages until one has entries, so the time of that is limited, too.
    """
    found: list[ObjectMeta] = []
    now = asyncio.get_running_loop().time
    async with asyncio.timeout(REQUEST_S) as limit:
        async for page in pages:
            found += page
            if len(found) > MAX_LISTED:
                raise Unreachable("a list that does not end")
            limit.reschedule(now() + REQUEST_S)
    return found


async def _asked(answer: Awaitable[Result]) -> Result:
    try:
        return await answer
    except (BaseError, OSError, ValueError) as error:
        translated = _translated(error)
    raise translated  # outside ``except``: the original may quote the server


def _translated(error: Exception) -> Exception:
    text = str(error)
    code = re.search(r"<Code>(\w{1,64})</Code>", text)
    status = re.search(r"status code: (\d{3})", text)
    said = code[1] if code else f"status {status[1]}" if status else "no answer"
    if isinstance(error, AlreadyExistsError):
        return Taken(said)
    if re.search(r"//169\.254\.|/latest/(api/token|meta-data)", text) and not code:
        return Refused(
            "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine "
            "a role"
        )
    if said in WRONG_SETTINGS or isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return Refused(said)
    if isinstance(error, FileNotFoundError | PreconditionError):
        return Missing(said)
    # Of the answer to a wrong region the client passes on neither its code nor the right one.
    is_redirect = status is not None and status[1] in ("301", "307", "308")
    if is_redirect or "redirect without LOCATION" in text:
        return Refused(REDIRECT)
    if status and status[1] == "501":
        return Unsound("it does not know writes that only create an object (If-None-Match)")
    if status and status[1] == "416":
        return Missing(said)
    if "Received non-partial response" in text:
        return Unsound("it answers a request for a part of an object with the whole object")
    return Unreachable(said)
