"""``kvtier export`` and ``kvtier import``: KV of prompts in one file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.core.errors import ConfigError
from kvtier.observe.live.wording import size
from kvtier.serve.engine.config import MODEL, EngineConfig
from kvtier.tools.cli.api_keys import take_control_key, take_key_source
from kvtier.tools.cli.output import AsJson, print_json, say
from kvtier.tools.cli.remote import Codec, key_option, tell_migrated
from kvtier.tools.cli.settings_options import settings_options
from kvtier.tools.report.figures import counted

if TYPE_CHECKING:
    from kvtier.tiers.remote.bucket.pack_file import PackFileIndex

KEYS = 'Keys to store with: "file:/path", "env:NAME" or "command:program arguments"; none for none.'
IMPORT_S = 3600.0
"""Longest wait for a server that imports a file."""


@settings_options(
    EngineConfig,
    [
        "device",
        "dtype",
        "revision",
        "block_size",
        "chunk_tokens",
        "device_capacity",
        "max_model_tokens",
        "threads",
    ],
    panel="Model",
    into="engine",
)
def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FROM",
            help="File of prompts: one text, or NAME.jsonl with a request per line. Or the URL of "
            "a store with the KV of any engine.",
        ),
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Pack file to write.")],
    model: Annotated[str, typer.Option(help=MODEL + " For prompts.", rich_help_panel="Model")] = "",
    about: Annotated[
        str, typer.Option(help="Text that messages about the file show.", show_default="none")
    ] = "",
    sign_key: Annotated[
        str, typer.Option(help="Private key (Ed25519, PEM) to sign with.", show_default="none")
    ] = "",
    max_bytes: Annotated[
        str,
        typer.Option(
            "--bytes",
            help='Most bytes of KV, of a store: "10GiB". The hottest blocks are taken.',
            show_default="all",
        ),
    ] = "",
    codec: Codec = "none",
    encryption_key: Annotated[str, key_option(KEYS)] = "",
    from_encryption_key: Annotated[str, key_option("Keys of the blocks of a store.")] = "",
    as_json: AsJson = False,
    *,
    engine: Mapping[str, Any],
) -> None:
    """Write the KV of prompts into one file, for other machines: kvtier import.

    The embedded engine computes prompts as kvtier serve does with the same model and options.
    Blocks of a store are those of whatever engine wrote them.
    """
    from kvtier.core.config import CodingConfig, parse_size
    from kvtier.tiers.remote.bucket.signing import Signer
    from kvtier.tiers.remote.migration import ALL_BYTES, StoreAccess
    from kvtier.tiers.remote.pack_files import export_store
    from kvtier.tools.report.bar import counting_bar

    signer = Signer(sign_key) if sign_key else None
    coding = CodingConfig(codec, take_key_source(encryption_key))
    access = StoreAccess(source, CodingConfig(encryption_key=take_key_source(from_encryption_key)))
    is_store = "://" in source
    if bool(model or engine) is is_store:
        raise ConfigError(
            "model: the KV of a store is not computed; leave --model and its options out"
            if is_store
            else "model: the KV of prompts belongs to a model; give --model as in kvtier serve"
        )
    with counting_bar("exporting") as note:
        if is_store:
            most = parse_size(max_bytes, "bytes") if max_bytes else ALL_BYTES
            index = export_store(access, file, coding, note, most, about=about, signer=signer)
        else:
            from kvtier.tools.cli.exporting import export_prompts

            config = EngineConfig(model=model, **engine)
            index = export_prompts(
                Path(source), file, config, coding, note, about=about, signer=signer
            )
    _tell(index, file, as_json)


def _tell(index: PackFileIndex, file: Path, as_json: bool) -> None:
    num_bytes, num_blocks = file.stat().st_size, sum(index.blocks.values())
    if as_json:
        print_json(
            {
                "file": str(file),
                "num_bytes": num_bytes,
                "num_blocks": num_blocks,
                "num_prompts": index.num_prompts,
                "num_tokens": index.num_tokens,
            }
        )
        return
    of = f" of {counted(index.num_prompts, 'prompt')}" if index.num_prompts else ""
    say(f"{file}: {counted(num_blocks, 'block')}{of}, {size(num_bytes)}")


def import_file(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Pack file of kvtier export.")],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TO",
            help='Store: "dir:///var/kv"; the disk of an engine that does not run: "disk:/var/kv"; '
            'or a running kvtier serve, which has a store: "http://127.0.0.1:8000".',
        ),
    ],
    public_key: Annotated[
        str,
        typer.Option(
            help="Public key (Ed25519, PEM) that must have signed the file.",
            show_default="no signature is needed",
        ),
    ] = "",
    disk_capacity: Annotated[
        str, typer.Option(help="Capacity of a disk that has no KV yet.", show_default="none")
    ] = "",
    codec: Codec = "none",
    encryption_key: Annotated[str, key_option(KEYS)] = "",
    from_encryption_key: Annotated[str, key_option("Keys of the blocks in the file.")] = "",
    as_json: AsJson = False,
) -> None:
    """Copy a pack file into a store, a disk, or the store of a running server.

    The whole file is verified before anything is written. Replicas may run meanwhile. A running
    server reads the file itself, needs the key of its control (KVTIER_CONTROL_KEY), and refuses KV
    of another model or other settings.

    Exits with 1 if some blocks could not be copied, with 2 if the file or TO can't be used.
    """
    from kvtier.core.config import CodingConfig, parse_size
    from kvtier.tiers.remote.migration import Migrated, StoreAccess
    from kvtier.tiers.remote.pack_files import import_pack_file, url_of
    from kvtier.tools.report.bar import counting_bar

    if target.startswith(("http://", "https://")):
        from kvtier.node.client.control import ServerControlClient

        client = ServerControlClient(target, take_control_key(None), IMPORT_S)
        key = str(Path(public_key).absolute()) if public_key else ""
        answer = client.post("/import", file=str(file.absolute()), public_key=key)
        store = answer.pop("store")
        found, more = Migrated(**answer), {"store": store}
    else:
        from_coding = CodingConfig(encryption_key=take_key_source(from_encryption_key))
        coding = CodingConfig(codec, take_key_source(encryption_key))
        with counting_bar("copying") as note:
            found, more = (
                import_pack_file(
                    StoreAccess(url_of(file, public_key), from_coding),
                    StoreAccess(target, coding),
                    note,
                    disk_capacity=parse_size(disk_capacity, "disk_capacity")
                    if disk_capacity
                    else 0,
                ),
                {},
            )
    tell_migrated(found, "imported", as_json, **more)
