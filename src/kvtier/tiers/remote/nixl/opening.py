"""``storage="nixl://PLUGIN/..."``: blocks in the storage of a NIXL plug-in.

Each block is a file below a folder: ``nixl://POSIX/folder``. Object plug-ins are not supported: OBJ
of NIXL 1.5.1 reports a read as done that got fewer bytes than requested.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Final

from kvtier.core.errors import ConfigError, install_command
from kvtier.tiers.remote.bounce_workers import Connect
from kvtier.tiers.remote.bounced_tier import BouncedTier
from kvtier.tiers.remote.location import Location, StoreOptions, StorePlugin
from kvtier.tiers.storage import StorageSite, StorageTier

OLDEST: Final = (1, 5)
"""Earlier versions report failed reads as done."""
TOO_NEW: Final = (2, 0)
"""Untested from this version on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlOptions(StoreOptions):
    """Options behind the ``?``."""

    params: str = ""
    """Parameters of the NIXL plug-in: "name=value,name=value"."""
    direct: bool = True
    """Whether to bypass the page cache if the file system supports it."""


def _check(location: Location, options: NixlOptions) -> None:
    if not location.host:
        raise ConfigError(f'storage: {location}: no plug-in; write it as "nixl://POSIX/folder"')
    _read_params(location, options.params)


def _make(site: StorageSite, location: Location, options: NixlOptions) -> StorageTier:
    params = _read_params(location, options.params)
    _check_version(location)
    return BouncedTier(site, location, options, _connect(location, options, params))


make_nixl = StorePlugin("nixl", NixlOptions, _make, _check)
"""Makes the tier of a ``nixl://`` URL."""


def _read_params(location: Location, text: str) -> dict[str, str]:
    params: dict[str, str] = {}
    for pair in filter(None, text.split(",")):
        name, sign, value = pair.partition("=")
        if not sign or not name:
            raise ConfigError(f'storage: {location}: params; write "name=value,name=value"')
        params[name] = value
    return params


def _check_version(location: Location) -> None:
    try:
        version = metadata.version("nixl")
    except metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"storage: nixl: needs the package nixl; install it: {install_command('nixl')}"
        ) from error
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if not OLDEST <= numbers < TOO_NEW:
        raise ConfigError(
            f"storage: {location}: NIXL {version} is not used: before 1.5 it calls failed reads "
            'done, and 2 nobody has tried; pip install "nixl>=1.5,<2"'
        )


def _connect(location: Location, options: NixlOptions, params: dict[str, str]) -> Connect:
    plugin = location.host.upper()  # urlsplit gives the host in lower case
    try:
        from kvtier.tiers.remote.nixl.agent import memory_kinds
        from kvtier.tiers.remote.nixl.files import FilesClient

        kinds = memory_kinds(plugin)
    except ImportError as error:
        raise ConfigError(f"storage: {location}: NIXL can't be used: {error}") from error
    if not kinds:
        raise ConfigError(f"storage: {location}: NIXL has no plug-in {plugin} that loads here")
    if "OBJ" in kinds:
        raise ConfigError(
            f"storage: {location}: {plugin} is not used, for NIXL's plug-ins for objects call a "
            "read done that was cut short; for S3 there is s3://bucket/prefix"
        )
    if "FILE" not in kinds:
        raise ConfigError(
            f"storage: {location}: the plug-in {plugin} keeps no files; use POSIX, or GDS_MT"
        )
    if not location.path:
        raise ConfigError(f'storage: {location}: no folder; write it as "nixl://{plugin}/folder"')
    return partial(FilesClient, plugin, params, Path("/") / location.path, options.direct)
