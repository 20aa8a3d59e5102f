"""Blocks in a bucket, a shared directory or a pack file.

``storage="s3://bucket/prefix"`` (S3 and compatible stores), ``"gs://..."`` (Google Cloud Storage),
``"az://..."`` (Azure, where a bucket is called a container), ``"dir:///mnt/shared/kv"`` or
``"pack:///srv/prompts.kvpack"``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier.core.errors import ConfigError
from kvtier.tiers.remote.bucket.packs import PACK_BYTES
from kvtier.tiers.remote.location import Location, StoreOptions, StorePlugin
from kvtier.tiers.storage import StorageSite, StorageTier


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions(StoreOptions):
    """Options behind the ``?`` of every store that keeps packs."""

    pack_bytes: int = PACK_BYTES
    """Approximate size of an object; at least one block. Like "16MiB"."""
    poll_s: float = 5.0
    """Interval of reading other writers' manifests, in seconds; 0 for only at the start."""
    publish_s: float = 1.0
    """Interval of publishing written blocks to other readers, in seconds. A process that is killed
    loses what it wrote in the last interval."""
    max_age_s: float = 0.0
    """Maximum age of packs that are used; 0 for no limit. Set it a little below the bucket's
    expiration rule."""
    requests: int = 8
    """Packs that one call reads or writes concurrently; each takes memory meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketOptions(PackOptions):
    """Options of every service that keeps buckets."""

    endpoint: str = ""
    """Address of the store, "http://host:port". Default: the variable of the service that names it,
    then the service's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options(BucketOptions):
    """Options of S3 and compatible stores."""

    region: str = ""
    """Region of the bucket. Default: ``AWS_REGION``."""
    sign_payload: bool = False
    """Whether the bytes are signed along with the request, which takes 0.7 s of a core per GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureOptions(BucketOptions):
    """Options of Azure Blob Storage. The host of the URL is the container."""

    account: str = ""
    """Storage account. Default: ``AZURE_STORAGE_ACCOUNT_NAME``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryOptions(PackOptions):
    """Options of a shared directory."""

    capacity: int = 0
    """Maximum size of all packs, like "2TiB"; 0 for no limit. The same for all processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackFileOptions(PackOptions):
    """Options of a pack file, which never changes."""

    poll_s: float = 0.0
    public_key: str = ""
    """File with the public key (PEM) that must have signed it. Default: a signature is not
    needed."""


@dataclass(frozen=True, slots=True)
class BucketService:
    """A service that keeps buckets.

    Attributes:
        options: of its URLs.
        endpoints: environment variables with the address of a server; the first that is set counts.
        variables: where its other settings are, for messages.
        credentials: what to set for access, for messages.
    """

    options: type[BucketOptions]
    endpoints: tuple[str, ...]
    variables: str
    credentials: str


SERVICES: Final[Mapping[str, BucketService]] = {
    "s3": BucketService(
        S3Options,
        ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "AWS_",
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    ),
    "gs": BucketService(BucketOptions, (), "GOOGLE_", "GOOGLE_APPLICATION_CREDENTIALS"),
    "az": BucketService(
        AzureOptions,
        ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
        "AZURE_",
        "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    ),
}
"""Services by the scheme of their URLs."""
DIRECTORY: Final = "dir"
"""Scheme of a shared directory."""
PACK_FILE: Final = "pack"
"""Scheme of a pack file, which is only read."""
NOT_OF_PACK_FILES: Final = ("pack_bytes", "poll_s", "publish_s", "max_age_s", "writers")
MIN_PACKS: Final = 4
"""Smallest capacity of a directory: with less, a pack is deleted as soon as it was written."""


def _make(site: StorageSite, location: Location, options: PackOptions) -> StorageTier:
    if site.capacity_bytes < site.group.bytes_per_block:
        raise ConfigError(
            f"{site.name}: storage_capacity of {site.capacity_bytes} bytes is below one block "
            f"({site.group.bytes_per_block} bytes); raise it"
        )
    if isinstance(options, DirectoryOptions) and 0 < options.capacity < 2 * (
        site.group.bytes_per_block
    ):
        raise ConfigError(
            f"{site.name}: capacity of {options.capacity:,} bytes is below two blocks "
            f"({site.group.bytes_per_block:,} bytes each); raise it"
        )
    from kvtier.tiers.remote.bucket.tier import BucketTier  # needs the client

    if isinstance(options, PackFileOptions):
        from kvtier.tiers.remote.bucket.pack_objects import open_pack_file

        open_pack_file(location, options).check_block_bytes(site.group.bytes_per_block)
    return BucketTier(site, location, options)


def endpoint_of(location: Location, options: BucketOptions) -> str:
    """Return the store's address from the options or the environment; "" for the service's own."""
    return _endpoint(location, options)[1]


def _endpoint(location: Location, options: BucketOptions) -> tuple[str, str]:
    """Return the name of the setting that gives the store's address, and the address."""
    if options.endpoint:
        return "endpoint", options.endpoint
    variables = SERVICES[location.scheme].endpoints
    named = ((name, os.environ.get(name, "")) for name in variables)
    return next((each for each in named if each[1]), ("endpoint", ""))


def check_location(location: Location, options: BucketOptions) -> None:
    """Raise ``ConfigError`` for invalid combinations."""
    scheme, credentials = location.scheme, SERVICES[location.scheme].credentials
    if not location.host:
        raise ConfigError(f'storage: {scheme}: no bucket; write it as "{scheme}://bucket/prefix"')
    if location.user is not None or location.password is not None:
        raise ConfigError(f"storage: {location}: credentials do not belong here; set {credentials}")
    if location.port is not None:
        raise ConfigError(
            f"storage: {location}: a bucket has no port; give the server as "
            "?endpoint=http://host:port"
        )
    name, endpoint = _endpoint(location, options)
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"storage: {location}: {name} begins with http:// or https://")
    if "@" in endpoint:
        raise ConfigError(
            f"storage: {location}: credentials do not belong into {name}; set {credentials}"
        )
    _check_options(location, options)


def _check_options(location: Location, options: PackOptions) -> None:
    if options.requests < 1:
        raise ConfigError(f"storage: {location}: requests is 1 at least")
    if not options.publish_s:
        raise ConfigError(f"storage: {location}: publish_s is above 0")


def check_directory(location: Location, options: DirectoryOptions) -> None:
    """Raise ``ConfigError`` for a URL that names no directory. The file system is not read."""
    if location.host:
        shown = f"{location.host}/{location.path}".rstrip("/")
        raise ConfigError(
            f"storage: dir: {shown} is no absolute path; write three slashes, as in "
            f'"dir:///{shown}"'
        )
    if not location.path or ".." in location.path.split("/"):
        raise ConfigError(
            'storage: dir: names no directory; write it as "dir:///mnt/shared/kv", without ".."'
        )
    if options.capacity and options.capacity < MIN_PACKS * options.pack_bytes:
        raise ConfigError(
            f"storage: {location}: capacity of {options.capacity:,} bytes is below {MIN_PACKS} "
            f"packs of {options.pack_bytes:,} bytes; raise it, or lower pack_bytes"
        )
    if options.capacity and not options.poll_s:
        raise ConfigError(f"storage: {location}: a capacity needs poll_s above 0")
    _check_options(location, options)


def check_pack_file(location: Location, options: PackFileOptions) -> None:
    """Raise ``ConfigError`` for a URL that names no file. The file is not read."""
    if location.host or not location.path:
        raise ConfigError(
            "storage: pack: names no file; write its absolute path behind three slashes, as in "
            '"pack:///srv/prompts.kvpack"'
        )
    if useless := next((name for name in NOT_OF_PACK_FILES if name in location.given), ""):
        raise ConfigError(f"storage: {location}: {useless} is no option of a pack file")
    _check_options(location, options)


make_s3, make_google, make_azure = (
    StorePlugin(scheme, service.options, _make, check_location)
    for scheme, service in SERVICES.items()
)
"""Makes the tier of ``storage="s3://bucket/prefix?option=value"``, of ``gs://`` and ``az://``."""
make_directory = StorePlugin(DIRECTORY, DirectoryOptions, _make, check_directory)
"""Makes the tier of ``storage="dir:///mnt/shared/kv?capacity=2TiB"``."""
make_pack_file = StorePlugin(PACK_FILE, PackFileOptions, _make, check_pack_file)
"""Makes the tier of ``storage="pack:///srv/prompts.kvpack?public_key=/etc/kvtier/packs.pub"``."""
PACK_STORES: Final[Mapping[str, StorePlugin[Any]]] = {
    "s3": make_s3,
    "gs": make_google,
    "az": make_azure,
    DIRECTORY: make_directory,
    PACK_FILE: make_pack_file,
}
"""Plug-ins of the stores that keep packs, by the scheme of their URLs."""
