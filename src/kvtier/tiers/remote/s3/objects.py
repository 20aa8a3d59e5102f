"""Objects in a bucket, and errors whose messages contain no secrets."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from kvtier.core.system.hosts import is_local
from kvtier.tiers.remote.errors import Refused, Unreachable, Unsound
from kvtier.tiers.remote.s3.manifests import MAX_BYTES

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

    sign_payload: whether bodies are signed, too. Blocks do not need that: they have checksums and
    optional tags of their own.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str,
        endpoint: str = "",
        region: str = "",
        sign_payload: bool = False,
    ) -> None:
        # Under both names: the second one takes precedence over the environment.
        names = ("endpoint", "aws_endpoint_url_s3") if endpoint else ()
        where = dict.fromkeys(names, endpoint)
        where |= {"region": region} if region else {}
        host = urlsplit(endpoint).hostname or ""
        # Without a proxy of its own the client uses that of the environment, which can't reach a
        # server on this machine. This one is used for no request.
        no_proxy: ClientConfig = {"proxy_url": endpoint, "proxy_excludes": host}
        self._store = S3Store(
            bucket,
            prefix=prefix or None,
            unsigned_payload=not sign_payload,
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

    async def put(self, path: str, content: object, create: bool = False) -> str:
        """Write an object and return its version. create: raise ``Taken`` if it exists."""
        mode = "create" if create else "overwrite"
        put = obstore.put_async(
            self._store,
            path,
            content,  # type: ignore[arg-type]
            mode=mode,  # type: ignore[arg-type]
            use_multipart=False,
        )
        return (await _asked(put))["e_tag"] or ""

    async def get(self, path: str) -> bytes:
        """Return a whole, small object."""
        found = await _asked(obstore.get_async(self._store, path))
        if found.meta["size"] > MAX_BYTES:
            raise Refused("it is too large")
        return bytes(await _asked(found.bytes_async()))

    async def part(self, path: str, start: int, end: int, version: str = "") -> memoryview:
        """Return a range of bytes of an object, cut at its end. version: only of this version."""
        if version:
            options = obstore.get_async(
                self._store, path, options={"range": (start, end), "if_match": version}
            )
            found = await _asked(options)
            return memoryview(await _asked(found.bytes_async()))
        return memoryview(
            await _asked(obstore.get_range_async(self._store, path, start=start, end=end))
        )

    async def names(self, path: str) -> list[tuple[str, int]]:
        """Return path and size of each object below ``path``."""
        return [(each.path, each.num_bytes) for each in await self.listed(path)]

    async def listed(self, path: str) -> list[Listed]:
        """Return the objects below ``path``; a list that does not end is ``Unreachable``."""
        pages = obstore.list(self._store, path, chunk_size=PAGE)
        return [
            Listed(each["path"], each["size"], each["last_modified"].timestamp())
            for each in await _asked(_whole(pages))
        ]

    async def version(self, path: str) -> str:
        """Return the version of an object."""
        return (await _asked(obstore.head_async(self._store, path)))["e_tag"] or ""

    async def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; missing ones are ignored."""
        if paths:
            await _asked(obstore.delete_async(self._store, list(paths)))


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
