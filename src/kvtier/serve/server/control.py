"""Control of the server's own cache, by the same requests as a node's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from fastapi import APIRouter
from pydantic import ValidationError

from kvtier import __version__
from kvtier.cache.deletion import Deletion
from kvtier.cache.tokens import Cache
from kvtier.control.contract import (
    CacheControl,
    ControlError,
    Deleted,
    HintedPrompt,
    PinnedBlocks,
    PromptName,
    PromptPlaces,
    check_pin,
    check_wait,
)
from kvtier.control.routes import ControlBody, control_router
from kvtier.core.hints import Hint
from kvtier.core.keys import Labels, grid_labels
from kvtier.core.types import HOST
from kvtier.serve.server.chat import chat_text
from kvtier.serve.server.errors import ApiError, from_validation
from kvtier.serve.server.schemas import ChatRequest
from kvtier.serve.server.service import Service
from kvtier.tiers.remote.migration import StoreAccess
from kvtier.tiers.remote.pack_files import import_pack_file, url_of
from kvtier.tiers.row import split_storage, takes_writes, undeletable

LOOK_AGAIN_S = 0.01
"""Time between two looks at whether something has ended."""
DEFAULT_TENANT = "default"
"""Name of the room of requests without a ``cache_salt``."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ServerRoom:
    """Use of the cache by the requests with one ``cache_salt``.

    name: the tenant, or for one that has not asked since the server started, the beginning of the
    namespace's digest. tenant: the ``cache_salt``. used_bytes: by tier.
    """

    name: str
    tenant: str
    block_bytes: int
    used_bytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class ServerState:
    """State of a server's cache. rooms: of each namespace with a block."""

    version: str
    pinned_blocks: int
    rooms: Sequence[ServerRoom]


@dataclass(frozen=True, slots=True)
class ImportedFile:
    """Result of an import. store: name of the store. The others are as in ``Migrated``."""

    store: str
    num_copied: int
    num_bytes: int
    num_there: int
    num_damaged: int
    num_unreadable: int
    num_refused: int


class ImportBody(ControlBody):
    """A pack file to be imported.

    file: absolute path on the server's machine. public_key: path of the key that must have signed
    it; "" for none.
    """

    file: str
    public_key: str = ""


class ServerControl(CacheControl):
    """Changes and look-ups of the cache of one server. Used by the event loop's thread."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._engine = service.engine

    async def status(self) -> ServerState:
        """Return the use of the cache by namespace. Cost on the engine's thread: O(all blocks)."""
        used = await self._call(Cache.used_by_namespace)
        pinned = await self._call(lambda cache: cache.pins.num_blocks)
        tenants = {
            namespace: salt
            for salt in self._service.tenants
            for namespace in self._engine.namespaces_of(salt)
        }
        return ServerState(
            __version__,
            pinned,
            [
                ServerRoom(
                    tenants.get(namespace, namespace.hex()[:16]) or DEFAULT_TENANT,
                    tenants.get(namespace, ""),
                    self._engine.cache.group.bytes_per_block,
                    tiers,
                )
                for namespace, tiers in used.items()
            ],
        )

    async def lookup(self, prompt: PromptName, timeout_s: float) -> PromptPlaces:
        namespace, labels = await self._prompt(prompt)
        until_s = time.monotonic() + check_wait(timeout_s)
        await self._until(lambda cache: not cache.lookup(namespace, labels), until_s)
        places = await self._call(lambda cache: cache.locate(namespace, labels))
        return PromptPlaces.of(_room(prompt.tenant), places)

    async def prefetch(self, prompt: PromptName, timeout_s: float) -> PromptPlaces:
        namespace, labels = await self._prompt(prompt)
        until_s = time.monotonic() + check_wait(timeout_s)
        await self._bring(namespace, labels, until_s)
        places = await self._call(lambda cache: cache.locate(namespace, labels))
        return PromptPlaces.of(_room(prompt.tenant), places)

    async def _bring(self, namespace: bytes, labels: Labels, until_s: float) -> None:
        await self._until(lambda cache: not cache.lookup(namespace, labels), until_s)
        found = None
        while found is None:
            found = await self._call(lambda cache: cache.prefetch(namespace, labels))
            if found is None:
                if time.monotonic() >= until_s:
                    return
                await asyncio.sleep(LOOK_AGAIN_S)
        begun = found
        try:
            await self._until(lambda _: begun.ready, until_s)
        finally:
            await self._call(lambda cache: cache.end_prefetch(begun))

    async def pin(self, prompt: PromptName, seconds: float, timeout_s: float) -> PinnedBlocks:
        check_pin(seconds)
        namespace, labels = await self._prompt(prompt)
        await self._bring(namespace, labels, time.monotonic() + check_wait(timeout_s))
        number, pinned = await self._call(lambda cache: cache.pin(namespace, labels, seconds))
        return PinnedBlocks(_room(prompt.tenant), number, len(labels), pinned)

    async def hint(self, prompt: PromptName, hint: Hint) -> HintedPrompt:
        namespace, labels = await self._prompt(prompt)
        results = await self._call(lambda cache: cache.hint(namespace, labels, hint))
        return HintedPrompt(_room(prompt.tenant), len(labels), [it.as_json() for it in results])

    async def unpin(self, room: str, number: int) -> None:
        if not await self._call(lambda cache: cache.pins.remove(number)):
            raise ControlError(f"there is no pin {number}", is_unknown=True)

    async def delete(self, prompt: PromptName, timeout_s: float) -> Deleted:
        _, labels = await self._prompt(prompt)
        namespaces = self._engine.namespaces_of(_salt(prompt.tenant))
        return await self._delete(
            lambda cache: Deletion.joined([cache.delete(name, labels) for name in namespaces]),
            check_wait(timeout_s),
            [_room(prompt.tenant)],
            len(labels),
        )

    async def delete_rooms(self, room: str, tenant: str, timeout_s: float) -> Deleted:
        if bool(room) == bool(tenant):
            raise ControlError("name a room or a tenant, and not both")
        meant = await self._namespaces(room or tenant)
        return await self._delete(
            lambda cache: cache.delete_all(meant.__contains__),
            check_wait(timeout_s),
            [room or tenant],
        )

    async def clear(self, room: str, memory_only: bool, timeout_s: float) -> Deleted:
        check_wait(timeout_s)
        if memory_only:
            if room:
                raise ControlError("memory is cleared of all rooms at once; name none")
            await self._call(lambda cache: cache.clear(HOST))
            await self._call(Cache.clear)
            return Deleted(True, [], None, [])
        if room:
            return await self.delete_rooms(room, "", timeout_s)
        return await self._delete(lambda cache: cache.delete_all(lambda _: True), timeout_s, [])

    async def _delete(
        self,
        begin: Callable[[Cache], Deletion],
        timeout_s: float,
        rooms: Sequence[str],
        num_blocks: int | None = None,
    ) -> Deleted:
        until_s = time.monotonic() + timeout_s
        deletion = await self._call(begin)
        problems = undeletable(self._engine.config.cache.stores)
        if not await self._until(lambda cache: cache.is_deleted(deletion), until_s):
            problems.append(
                "some tier has not confirmed it: storage is slow, or a request still uses blocks; "
                "the deletion goes on while the server runs"
            )
        if num_blocks is None:
            problems += [
                f"{name}: blocks that this server does not know can't be listed there"
                for name in await self._call(Cache.shared_storages)
            ]
        return Deleted(not problems, rooms, num_blocks, problems)

    async def import_file(self, file: str, public_key: str) -> ImportedFile:
        """Copy a pack file of this machine into the first store that takes writes."""
        cache, identity = self._engine.config.cache, self._engine.kv_identity
        stores = [each for each in cache.stores if takes_writes(each)]
        if not stores:
            raise ControlError(
                "this server has no store to import into; start it with --storage dir:///var/kv, "
                f"or with --storage {url_of(Path(file))} to use the file as it is"
            )
        source = StoreAccess(url_of(Path(file), public_key), cache.coding)
        target = StoreAccess(stores[0], cache.coding)
        done = await asyncio.to_thread(
            import_pack_file, source, target, lambda done, num: None, identity
        )
        return ImportedFile(split_storage(stores[0])[0], **asdict(done))

    # -- names -------------------------------------------------------------------------------------

    async def _prompt(self, prompt: PromptName) -> tuple[bytes, Labels]:
        """Return the namespace and the labels of a prompt."""
        given, info = prompt.prompt, self._engine.info
        if prompt.chat is not None:
            given = await asyncio.to_thread(self._chat_tokens, prompt.chat)
        if given is None:
            raise ControlError("a server knows prompts by their text or token ids; give prompt")
        if prompt.room:
            raise ControlError("a prompt belongs to a tenant; name it, and no room")
        if isinstance(given, str):
            text = given
            encode = self._engine.tokenizer.encode
            given = await asyncio.to_thread(lambda: encode(text, special_tokens=True))
        labels = grid_labels(given, info.block_size, info.chunk_tokens)
        if not len(labels):
            raise ControlError(
                f"the prompt has {len(given)} tokens; only whole chunks of {info.chunk_tokens} are "
                "kept"
            )
        return self._engine.namespace_of(_salt(prompt.tenant)), labels

    def _chat_tokens(self, chat: Mapping[str, object]) -> list[int]:
        try:
            asked = ChatRequest.model_validate({**chat, "model": self._service.model_name})
            text = chat_text(asked, self._service)
        except ValidationError as error:
            raise ControlError(f"chat: {from_validation(error.errors()).message}") from None
        except ApiError as error:
            raise ControlError(f"chat: {error.message}") from None
        return self._engine.tokenizer.encode(text)

    async def _namespaces(self, room: str) -> frozenset[bytes]:
        """Return the namespaces of a room's name, or of a tenant."""
        mine = self._engine.namespaces_of(_salt(room))
        used = await self._call(Cache.used_by_namespace)
        return frozenset({*mine, *(each for each in used if each.hex()[:16] == room)})

    # -- the engine's thread -----------------------------------------------------------------------

    def _call(self, work: Callable[[Cache], Result]) -> Awaitable[Result]:
        """Run ``work`` on the engine's thread, between two of its steps."""
        cache = self._engine.cache
        return asyncio.wrap_future(self._engine.call_later(lambda: work(cache)))

    async def _until(self, is_over: Callable[[Cache], bool], until_s: float) -> bool:
        """Wait until something is over. Return whether it is, in time."""

        def look(cache: Cache) -> bool:
            cache.poll()
            return is_over(cache)

        while not await self._call(look):
            if time.monotonic() >= until_s:
                return False
            await asyncio.sleep(LOOK_AGAIN_S)
        return True


def _room(tenant: str) -> str:
    return tenant or DEFAULT_TENANT


def _salt(tenant: str) -> str:
    return "" if tenant == DEFAULT_TENANT else tenant


def server_control_router(service: Service) -> APIRouter:
    """Return the routes of the control of a server's cache."""
    control = ServerControl(service)
    router = control_router(control)

    @router.get("/status")
    async def status() -> ServerState:
        """Return the use of the cache by namespace."""
        return await control.status()

    @router.post("/import")
    async def import_file(body: ImportBody) -> ImportedFile:
        """Import a pack file."""
        return await control.import_file(body.file, body.public_key)

    return router
