"""Blocks in a bucket of S3 or a compatible store: ``storage="s3://bucket/prefix"``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from kvtier.core.errors import ConfigError
from kvtier.tiers.remote.location import Location, StoreOptions, StorePlugin
from kvtier.tiers.remote.s3.packs import PACK_BYTES
from kvtier.tiers.storage import StorageSite, StorageTier

ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
"""Environment variables that name a server; the first one that is set counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options(StoreOptions):
    """Options behind the ``?``."""

    endpoint: str = ""
    """Address of the store, "http://host:port". Default: ``AWS_ENDPOINT_URL_S3``, then
    ``AWS_ENDPOINT_URL``, then AWS."""
    region: str = ""
    """Region of the bucket. Default: ``AWS_REGION``."""
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
    sign_payload: bool = False
    """Whether the bytes are signed along with the request, which takes 0.7 s of a core per GB."""


def _make(site: StorageSite, location: Location, options: S3Options) -> StorageTier:
    if site.capacity_bytes < site.group.bytes_per_block:
        raise ConfigError(
            f"{site.name}: storage_capacity of {site.capacity_bytes} bytes is below one block "
            f"({site.group.bytes_per_block} bytes); raise it"
        )
    from kvtier.tiers.remote.s3.tier import S3Tier  # needs the client

    return S3Tier(site, location, options)


def endpoint_of(options: S3Options) -> str:
    """Return the store's address from the options or the environment; "" for AWS."""
    return _endpoint(options)[1]


def _endpoint(options: S3Options) -> tuple[str, str]:
    """Return the name of the setting that gives the store's address, and the address."""
    if options.endpoint:
        return "endpoint", options.endpoint
    named = ((name, os.environ.get(name, "")) for name in ENDPOINTS)
    return next((each for each in named if each[1]), ("endpoint", ""))


def check_location(location: Location, options: S3Options) -> None:
    """Raise ``ConfigError`` for invalid combinations."""
    if not location.host:
        raise ConfigError('storage: s3: no bucket; write it as "s3://bucket/prefix"')
    if location.user is not None or location.password is not None:
        raise ConfigError(
            f"storage: {location}: credentials do not belong here; set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        )
    if location.port is not None:
        raise ConfigError(
            f"storage: {location}: a bucket has no port; give the server as "
            "?endpoint=http://host:port"
        )
    name, endpoint = _endpoint(options)
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"storage: {location}: {name} begins with http:// or https://")
    if "@" in endpoint:
        raise ConfigError(
            f"storage: {location}: credentials do not belong into {name}; set AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY"
        )
    if options.requests < 1:
        raise ConfigError(f"storage: {location}: requests is 1 at least")
    if not options.publish_s:
        raise ConfigError(f"storage: {location}: publish_s is above 0")


make_s3 = StorePlugin("s3", S3Options, _make, check_location)
"""Makes the tier of ``storage="s3://bucket/prefix?option=value"``."""
