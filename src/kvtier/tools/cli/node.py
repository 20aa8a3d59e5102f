"""``kvtier node``: run the cache of a machine, and control it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.core.errors import ConfigError, install_command
from kvtier.core.system.user_paths import check_socket
from kvtier.core.types import LogFormat
from kvtier.node.config import (
    DEFAULT_SOCKET,
    NodeConfig,
    parse_events,
    parse_quotas,
    parse_tenant_users,
    split_bounds,
)
from kvtier.observe.live.wording import seconds, size
from kvtier.tools.cli.api_keys import CONTROL_KEY_VARIABLE, take_control_key, take_key_source
from kvtier.tools.cli.command import CommandLine
from kvtier.tools.cli.failure import starting
from kvtier.tools.cli.output import AsJson, print_json, say
from kvtier.tools.cli.serve import LogLevel
from kvtier.tools.cli.settings_options import settings_options
from kvtier.tools.report.figures import counted

if TYPE_CHECKING:
    from kvtier.node.client.control import ControlClient, ServerControlClient

app = CommandLine()

SOCKET = str(DEFAULT_SOCKET)
ANSWER_S = 30.0
"""Longest wait for an answer, beyond the time that the node itself was given."""
FOUND_WRONG = 1
"""Exit status of a deletion that some storage has not confirmed."""


@app.callback()
def node() -> None:
    """Run one cache for all engines of a machine, and control it."""


Socket = Annotated[
    str,
    typer.Option(
        "--socket",
        help="Path of the node's socket for engines; or URL of a kvtier server that has a control "
        f"key, given as {CONTROL_KEY_VARIABLE}.",
    ),
]
Prompt = Annotated[
    str | None,
    typer.Option("--prompt", help="Text of the prompt, for a server.", show_default="none"),
]
Tenant = Annotated[
    str, typer.Option("--tenant", help="cache_salt of the prompt's requests, for a server.")
]
SlotAllocator = Annotated[
    str,
    typer.Option(
        "--room",
        help="Name of the room, as kvtier node status shows it.",
        show_default="the only one",
    ),
]
Keys = Annotated[
    list[str] | None,
    typer.Argument(
        help="Keys of the prompt's blocks in their order: those that the engine uses, in "
        "hexadecimal. Without any they are read from standard input, one per line.",
        show_default="standard input",
    ),
]
Wait = Annotated[float, typer.Option("--timeout-s", help="Longest wait for storage, in seconds.")]


@app.command()
@settings_options(NodeConfig, reads_environment=True)
def run(
    quota: Annotated[
        list[str] | None,
        typer.Option(
            help='Floor and ceiling of a tenant\'s host memory: "team-a=10GiB:40GiB"; either may '
            "be missing. Repeat the option for several tenants.",
            show_default="none",
        ),
    ] = None,
    disk_quota: Annotated[
        list[str] | None,
        typer.Option(
            "--disk-quota",
            help='Floor and ceiling of a tenant\'s disk space: "team-a=100GiB:400GiB"; either may '
            "be missing. A floor needs --disk-total. Repeat the option for several tenants.",
            show_default="none",
        ),
    ] = None,
    tenant_users: Annotated[
        list[str] | None,
        typer.Option(
            "--tenant-users",
            help='Users whose engines may name a tenant, by uid: "team-a=1000,1001". Other tenants '
            "are for the node's own user and root, the default one for everybody. Repeat the "
            "option for several tenants.",
            show_default="none",
        ),
    ] = None,
    events: Annotated[
        list[str] | None,
        typer.Option(
            help="ZeroMQ addresses at which KV events are published for routers, and replayed, and "
            'their topic, as far as wanted: "tcp://127.0.0.1:5557,tcp://127.0.0.1:5558,kv@...". '
            "Events contain token ids of prompts, and salts. Each model needs an address of its "
            'own: repeat the option as "my-model=tcp://...", or "team-a/my-model=tcp://..." for '
            "one tenant.",
            show_default="none",
        ),
    ] = None,
    log_level: Annotated[
        LogLevel, typer.Option(help="Level of the log on stderr.")
    ] = LogLevel.INFO,
    log_format: Annotated[
        LogFormat | None,
        typer.Option(help="Format of the log: text or json.", show_default="text"),
    ] = None,
    *,
    settings: Mapping[str, Any],
) -> None:
    """Run the node until SIGTERM, SIGINT or SIGHUP."""
    with starting("node run") as on_start:
        from kvtier.observe.logs import format_of, log_to_stderr

        log_to_stderr(log_level, format_of(log_format))
        try:
            from kvtier.node.server.run import run_node
        except ImportError as error:
            raise ConfigError(
                f"{error}; install what a node needs: {install_command('node')}"
            ) from None

        config = NodeConfig(
            quotas=parse_quotas(quota or (), disk_quota or ()),
            tenant_users=parse_tenant_users(tenant_users or ()),
            events=parse_events(events or ()),
            **{**settings, "encryption_key": take_key_source(settings.get("encryption_key", ""))},
        )

        def tell(port: int | None) -> None:
            on_start()
            at = "" if port is None else f", and http://127.0.0.1:{port}/metrics"
            typer.echo(
                f"kvtier node serves {size(config.host_bytes)} at {config.socket}{at}; "
                f"control: {config.control_socket}"
            )

        run_node(config, tell)


@app.command()
def status(socket: Socket = SOCKET, as_json: AsJson = False) -> None:
    """Show engines, tenants and rooms. A room is the cache of one model for one tenant."""
    told = _client(socket).get("/status")
    if as_json:
        print_json(told)
        return
    if "engines" not in told:
        _show_server(told)
        return
    say(
        f"kvtier {told['version']}, {size(told['memory_bytes'])} in {told['segments']} segments of "
        f"{size(told['segment_bytes'])}, {told['free_segments']} free; "
        f"started {seconds(told['uptime_s'])} ago"
    )
    if told["unverified_blocks"] or told["slots_aside"]:
        say(
            f"of the node before: {told['unverified_blocks']} blocks are yet to be verified, "
            f"{told['slots_aside']} slots may be in use by its engines"
        )
    for each in told["engines"]:
        pids = ", ".join(map(str, each["pids"]))
        name = each.get("title") or each["name"]
        say(f"engine {name} of {each['tenant']}: {each['slots']} slots; processes {pids}")
    _show_tenants(told["tenants"], told["segment_bytes"])
    for each in told["rooms"]:
        _show_room(each)


@app.command()
def lookup(
    keys: Keys = None,
    room: SlotAllocator = "",
    prompt: Prompt = None,
    tenant: Tenant = "",
    timeout_s: Wait = 10.0,
    socket: Socket = SOCKET,
    as_json: AsJson = False,
) -> None:
    """Show where the blocks of a prompt are."""
    _prompt("/lookup", _named(keys, room, prompt, tenant), timeout_s, socket, as_json)


@app.command()
def prefetch(
    keys: Keys = None,
    room: SlotAllocator = "",
    prompt: Prompt = None,
    tenant: Tenant = "",
    timeout_s: Wait = 10.0,
    socket: Socket = SOCKET,
    as_json: AsJson = False,
) -> None:
    """Read the blocks of a prompt from disk and stores into memory."""
    _prompt("/prefetch", _named(keys, room, prompt, tenant), timeout_s, socket, as_json)


@app.command()
def pin(
    keys: Keys = None,
    room: SlotAllocator = "",
    for_s: Annotated[
        float, typer.Option("--for-s", help="Seconds for which the blocks stay in memory.")
    ] = 600.0,
    end: Annotated[
        int | None, typer.Option("--end", help="End the pin of this number instead.")
    ] = None,
    prompt: Prompt = None,
    tenant: Tenant = "",
    timeout_s: Wait = 10.0,
    socket: Socket = SOCKET,
    as_json: AsJson = False,
) -> None:
    """Keep the blocks of a prompt in memory for a time.

    A tenant may pin its floor, or half of the memory that no other tenant's floor reserves.
    """
    if end is not None:
        told = _client(socket).post("/unpin", room=room, number=end)
        print_json(told) if as_json else say(f"pin {end} has ended")
        return
    told = _client(socket, timeout_s).post(
        "/pin", **_named(keys, room, prompt, tenant), seconds=for_s, timeout_s=timeout_s
    )
    if as_json:
        print_json(told)
    else:
        name = f"pin {told['number']}: " if told["number"] else ""
        say(f"{name}{told['pinned']} of {told['blocks']} blocks are pinned for {seconds(for_s)}")


@app.command()
def delete(
    keys: Annotated[
        list[str] | None,
        typer.Argument(
            help='Keys of a prompt\'s blocks in hexadecimal; "-" reads them from standard input.',
            show_default="the whole room",
        ),
    ] = None,
    room: Annotated[
        str, typer.Option(help="Name of the room, as kvtier node status shows it.")
    ] = "",
    tenant: Annotated[
        str,
        typer.Option(
            help="Delete all rooms of this tenant; with --prompt, the prompt of this cache_salt."
        ),
    ] = "",
    prompt: Prompt = None,
    timeout_s: Wait = 60.0,
    socket: Socket = SOCKET,
    as_json: AsJson = False,
) -> None:
    """Delete blocks from memory, disk and every store.

    When it succeeds, no tier returns them, also after a restart. Exits with 1 if some storage has
    not confirmed it.
    """
    body: dict[str, object] = {"room": room, "tenant": tenant, "timeout_s": timeout_s}
    if keys:
        body["keys"] = _keys(None if keys == ["-"] else keys)
    if prompt is not None:
        body["prompt"] = prompt
    _deleted(_client(socket, timeout_s).post("/delete", **body), as_json)


@app.command()
def clear(
    room: Annotated[str, typer.Option(help="Name of a room.", show_default="all rooms")] = "",
    memory_only: Annotated[
        bool, typer.Option("--memory-only", help="Only evict from memory what nothing uses.")
    ] = False,
    timeout_s: Wait = 60.0,
    socket: Socket = SOCKET,
    as_json: AsJson = False,
) -> None:
    """Delete all blocks of all rooms, from memory, disk and every store."""
    told = _client(socket, timeout_s).post(
        "/clear", room=room, memory_only=memory_only, timeout_s=timeout_s
    )
    _deleted(told, as_json, memory_only)


@app.command()
def quota(
    change: Annotated[
        str | None,
        typer.Argument(
            help='New floor and ceiling of a tenant, until the node ends: "team-a=10GiB:40GiB". '
            'One that is missing stays as it is; "team-a=:none" removes the ceiling.',
            show_default="show all",
        ),
    ] = None,
    of_disk: Annotated[
        bool, typer.Option("--disk", help="The new bounds are those of disk space.")
    ] = False,
    socket: Socket = SOCKET,
    as_json: AsJson = False,
) -> None:
    """Show quotas and use of memory and disk by tenant, or change a quota.

    Slabs keep their size: bounds of disk space count for those that are made later.
    """
    client = _client(socket)
    if change is not None:
        tenant, floor, ceiling = split_bounds(change)
        prefix = "disk_" if of_disk else ""
        bounds = {f"{prefix}floor": floor, f"{prefix}ceiling": ceiling}
        client.post("/quota", tenant=tenant, **bounds)
    told = client.get("/quota")
    if as_json:
        print_json(told)
    else:
        _show_tenants(told, client.get("/status")["segment_bytes"])


# -- what the commands share ----------------------------------------------------------------------


def _client(socket: str, timeout_s: float = 0.0) -> ControlClient | ServerControlClient:
    from kvtier.node.client.control import ControlClient, ServerControlClient

    if "://" in socket:
        return ServerControlClient(socket, take_control_key(None), timeout_s + ANSWER_S)
    check_socket(socket, "socket")
    return ControlClient(Path(socket), timeout_s + ANSWER_S)


def _named(keys: list[str] | None, room: str, prompt: str | None, tenant: str) -> dict[str, object]:
    """Return the fields of a request that name a prompt."""
    if prompt is not None:
        return {"prompt": prompt, "tenant": tenant, "room": room}
    return {"keys": _keys(keys), "tenant": tenant, "room": room}


def _keys(keys: list[str] | None) -> list[str]:
    return keys or sys.stdin.read().split()


def _prompt(
    route: str, named: dict[str, object], timeout_s: float, socket: str, as_json: bool
) -> None:
    told = _client(socket, timeout_s).post(route, **named, timeout_s=timeout_s)
    if as_json:
        print_json(told)
        return
    say(
        f"room {told['room']}: of {told['blocks']} blocks the first {told['in_memory']} are in "
        f"memory, the first {told['found']} in some tier"
    )


def _deleted(told: Any, as_json: bool, memory_only: bool = False) -> None:
    if as_json:
        print_json(told)
    else:
        num = told["blocks"]
        what = "all blocks" if num is None else counted(num, "block")
        for problem in told["problems"]:
            say(f"not complete: {problem}")
        if told["is_complete"]:
            rooms = ", ".join(told["rooms"])
            if not rooms:
                say("there was nothing to delete")
            elif memory_only:
                say(f"evicted {what} of {rooms} from memory")
            else:
                say(f"deleted {what} of {rooms}")
    if not told["is_complete"]:
        raise typer.Exit(FOUND_WRONG)


def _show_tenants(tenants: dict[str, Any], segment_bytes: int) -> None:
    for name, each in tenants.items():
        bounds = _bounds(each["floor_bytes"], each["ceiling_bytes"])
        held = size(each["segments"] * segment_bytes)
        pinned = size(each["pinned_segments"] * segment_bytes)
        say(f"tenant {name}: {held} of memory, {pinned} pinned; {bounds}")
        disk = each["disk_floor_bytes"], each["disk_ceiling_bytes"]
        if each["slab_bytes"] or disk != (0, None):
            say(f"  {size(each['slab_bytes'])} of disk; {_bounds(*disk)}")


def _bounds(floor: int, ceiling: int | None) -> str:
    most = "no ceiling" if ceiling is None else f"ceiling {size(ceiling)}"
    return f"floor {size(floor)}, {most}"


def _show_room(room: dict[str, Any]) -> None:
    name, shape = room["name"], f"blocks of {size(room['block_bytes'])}"
    if not room["is_open"]:
        say(f"room {name}: {shape}; on disk, no engine has asked for it yet")
        return
    used = ", ".join(f"{tier} {size(num)}" for tier, num in room["used_bytes"].items())
    say(f"room {name}: {shape}, {counted(room['segments'], 'segment')}; {used}")
    for tier, state in room["breakers"].items():
        if state != "closed" or tier in room["errors"]:
            say(f"  {tier}: {state} {room['errors'].get(tier, '')}")


def _show_server(told: dict[str, Any]) -> None:
    say(f"kvtier {told['version']}, a server; {told['pinned_blocks']} blocks are pinned")
    for each in told["rooms"]:
        used = ", ".join(f"{tier} {size(num)}" for tier, num in each["used_bytes"].items())
        say(f"room {each['name']}: blocks of {size(each['block_bytes'])}; {used}")
