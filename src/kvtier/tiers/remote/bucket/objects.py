"""Objects in a bucket, and errors whose messages contain no secrets."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar
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
    from obstore.store import AzureStore, GCSStore, S3Store
except ImportError as error:
    if error.name != "obstore":
        raise
    raise ConfigError(
        f"storage: s3, gs and az need the package obstore; install it: {install_command('s3')}"
    ) from error

from kvtier.core.system.hosts import is_local
from kvtier.tiers.remote.bucket.manifests import MAX_BYTES
from kvtier.tiers.remote.bucket.object_store import Listed, Missing, ObjectStore, Taken
from kvtier.tiers.remote.bucket.opening import (
    SERVICES,
    AzureOptions,
    BucketOptions,
    S3Options,
    endpoint_of,
)
from kvtier.tiers.remote.errors import Refused, Unreachable, Unsound
from kvtier.tiers.remote.location import Location

if TYPE_CHECKING:
    from obstore import ListStream, ObjectMeta
    from obstore.store import ClientConfig, RetryConfig

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
        "AccountIsDisabled",
        "AccountProblem",
        "AllAccessDisabled",
        "AuthenticationFailed",
        "AuthorizationFailure",
        "AuthorizationHeaderMalformed",
        "AuthorizationPermissionMismatch",
        "ContainerNotFound",
        "ExpiredToken",
        "IllegalLocationConstraintException",
        "InvalidAccessKeyId",
        "InvalidAuthenticationInfo",
        "InvalidBucketName",
        "InvalidResourceName",
        "InvalidToken",
        "NoSuchBucket",
        "PermanentRedirect",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
"""Error codes of the services that retries cannot fix."""
NO_BUCKET: Final = frozenset({"NoSuchBucket", "ContainerNotFound"})
REDIRECT: Final = "PermanentRedirect"
WRONG_REGION: Final = frozenset(
    {REDIRECT, "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
)
"""Those that a bucket of another region is answered with."""


class Objects(ObjectStore):
    """Objects below a prefix in a bucket.

    Of the server's response, the messages of errors contain only its code.

    Credentials come from the environment or the machine's role or workload identity. Requests are
    signed unless ``AWS_SKIP_SIGNATURE`` or ``AZURE_SKIP_SIGNATURE`` is set.

    Raises ``ConfigError`` for settings that the client refuses.
    """

    def __init__(self, location: Location, options: BucketOptions) -> None:
        self._service = SERVICES[location.scheme]
        self._bucket = location.host
        try:
            self._store = _open_store(location, options)
        except Exception as error:
            raise ConfigError(
                f"storage: {location}: the client refuses its settings ({type(error).__name__}); "
                f"see the environment's {self._service.variables} variables"
            ) from None

    async def put(self, path: str, content: object, create: bool = False) -> None:
        put = obstore.put_async(
            self._store,
            path,
            content,  # type: ignore[arg-type]
            mode="create" if create else "overwrite",
            use_multipart=False,
        )
        await self._asked(put)

    async def get(self, path: str) -> bytes:
        found = await self._asked(obstore.get_async(self._store, path))
        if found.meta["size"] > MAX_BYTES:
            raise Refused("it is too large")
        return bytes(await self._asked(found.bytes_async()))

    async def part(self, path: str, start: int, end: int) -> memoryview:
        return memoryview(
            await self._asked(obstore.get_range_async(self._store, path, start=start, end=end))
        )

    async def listed(self, path: str) -> list[Listed]:
        pages = obstore.list(self._store, path, chunk_size=PAGE)
        return [
            Listed(each["path"], each["size"], each["last_modified"].timestamp())
            for each in await self._asked(_whole(pages))
        ]

    async def delete(self, paths: Sequence[str]) -> None:
        if not paths:
            return
        try:
            await self._asked(obstore.delete_async(self._store, list(paths)))
        except Missing:  # Google's client ends at the first one
            for path in paths:
                with suppress(Missing):
                    await self._asked(obstore.delete_async(self._store, path))

    def explain(self, error: Refused | Unsound) -> str:
        if isinstance(error, Unsound):
            return f"this store can't be used: {error}"
        if str(error) in NO_BUCKET:
            return f"there is no bucket {self._bucket!r}; make it, or name another"
        if str(error) in WRONG_REGION:
            return (
                f"the bucket {self._bucket!r} is in another region or at another address "
                f"({error}); see the options region and endpoint"
            )
        return f"access was refused ({error}); see the credentials and the bucket's rules"

    async def _asked(self, answer: Awaitable[Result]) -> Result:
        try:
            return await answer
        except (BaseError, OSError, ValueError) as error:
            translated = _translated(error, self._service.credentials)
        raise translated  # outside ``except``: the original may quote the server


def _open_store(location: Location, options: BucketOptions) -> S3Store | GCSStore | AzureStore:
    endpoint = endpoint_of(location, options)
    host = urlsplit(endpoint).hostname or ""
    # Without a proxy of its own the client uses that of the environment, which can't reach a
    # server on this machine. This one is used for no request.
    no_proxy: ClientConfig = {"proxy_url": endpoint, "proxy_excludes": host}
    client: ClientConfig = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "timeout": timedelta(seconds=REQUEST_S),
        **(no_proxy if is_local(host) else {}),
    }
    retries: RetryConfig = {
        "max_retries": NUM_RETRIES,
        "retry_timeout": timedelta(seconds=RETRY_S),
        "backoff": {"init_backoff": timedelta(milliseconds=50)},
    }
    name, prefix = location.host, location.path or None
    where: Any = {"endpoint": endpoint} if endpoint else {}
    if location.scheme == "gs":
        where = {"base_url": endpoint} if endpoint else {}
        return GCSStore(name, prefix=prefix, client_options=client, retry_config=retries, **where)
    if isinstance(options, AzureOptions):
        where |= {"account_name": options.account} if options.account else {}
        return AzureStore(name, prefix=prefix, client_options=client, retry_config=retries, **where)
    assert isinstance(options, S3Options)
    # Under both names: the second one takes precedence over the environment.
    where |= {"aws_endpoint_url_s3": endpoint} if endpoint else {}
    where |= {"region": options.region} if options.region else {}
    # Blocks need no signature: they have checksums and optional tags of their own.
    where |= {"unsigned_payload": not options.sign_payload}
    return S3Store(name, prefix=prefix, client_options=client, retry_config=retries, **where)


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


def _translated(error: Exception, credentials: str) -> Exception:
    text = str(error)
    code = re.search(r"<Code>(\w{1,64})</Code>", text)
    status = re.search(r"status code: (\d{3})", text)
    said = code[1] if code else f"status {status[1]}" if status else "no answer"
    if isinstance(error, AlreadyExistsError):
        return Taken(said)
    if re.search(r"//169\.254\.|/latest/(api/token|meta-data)", text) and not code:
        return Refused(f"no credentials; set {credentials}, or give the machine a role")
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
