"""The engine: a thread that owns model, pool and cache, and serves requests from all threads."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from threading import Thread
from types import TracebackType
from typing import Self, TypeVar

import torch

from kvtier.cache.audit import Auditor
from kvtier.cache.lease import PrefixStored
from kvtier.cache.tokens import Cache
from kvtier.connectors.transformers.versions import warn_of_untested
from kvtier.core.config import parse_size
from kvtier.core.errors import ConfigError, DeviceError
from kvtier.core.hints import Hint
from kvtier.core.keys import Labels, Namespace, grid_labels
from kvtier.core.system.process import OwnerProcess, num_cores
from kvtier.core.types import Label
from kvtier.devices import Finding, find_device
from kvtier.identity import Basis, Identity
from kvtier.observe.block_events import BlockLog
from kvtier.observe.publisher import Publisher
from kvtier.serve.engine.audits import Audits
from kvtier.serve.engine.config import EngineConfig, EngineInfo
from kvtier.serve.engine.grammar import Grammar, Grammars
from kvtier.serve.engine.inbox import Inbox
from kvtier.serve.engine.models import LoadedModel, load_model
from kvtier.serve.engine.request import (
    Completion,
    Request,
    RequestError,
    RequestHandle,
    Token,
)
from kvtier.serve.engine.sampling import Sampler, SamplingParams
from kvtier.serve.engine.scheduler import Preview, Scheduler
from kvtier.serve.engine.self_check import choose_runner
from kvtier.tiers.remote.bucket.pack_file import KVIdentity
from kvtier.tiers.remote.pack_files import check_pack_files
from kvtier.tiers.row import lossy_codec

logger = logging.getLogger(__name__)

T = TypeVar("T")

IDLE_WAIT_S = 0.05
"""Sleep of an idle engine between two polls of copies in flight."""


class Engine:
    """Serves one model. Ready after construction, runs between ``start`` and ``close``.

    ``submit``, ``call`` and the handles are thread-safe.

    module: the model, of transformers.
    kv_identity: what its KV belongs to, without a salt.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._publisher: Publisher | None = None
        torch.set_num_threads(config.threads or min(torch.get_num_threads(), num_cores()))
        device_name = _device_name(config.device)
        device = torch.device(device_name)
        copier = find_device(device_name)
        copier.prepare()
        warn_of_untested()
        loaded = load_model(config.model, device, config.dtype, config.revision)
        logger.info("comparing the model's logits with those of transformers")
        model, self.check = choose_runner(
            config.model,
            loaded,
            config.block_size,
            config.chunk_tokens,
            lambda model: min(_limits(config, model).values()),
        )
        if model.profile.slow_because:
            logger.warning(
                "model: decode steps run one sequence at a time, by transformers' own attention, "
                "because %s",
                model.profile.slow_because,
            )
        group = model.profile.group(config.block_size)
        capacity, num_blocks = _capacity(config, model)
        limits = _limits(config, model)
        limit = min(limits.values())
        self.config = config
        self.profile = model.profile
        self.module = model.module
        self.tokenizer = model.tokenizer
        self.info = EngineInfo(
            model_name=model.name,
            device=device_name,
            dtype=str(model.module.dtype).removeprefix("torch."),
            attention=group.attention.value,
            vocab_size=int(model.module.config.get_text_config(decoder=True).vocab_size),
            num_parameters=sum(weight.numel() for weight in model.module.parameters()),
            max_model_tokens=limit,
            num_device_blocks=capacity // group.bytes_per_block,
            block_size=config.block_size,
            chunk_tokens=config.chunk_tokens,
            bytes_per_block=group.bytes_per_block,
            context_note=_context_note(limits),
        )
        self._runner = model.profile.make_runner(
            model.module, config.block_size, num_blocks, config.chunk_tokens
        )
        self._namespace = Namespace(
            model.identity.digest,  # not the name: renaming a folder does not change the model
            model.made_by,
            group.dtype.value,
            self._runner.fingerprint,
            config.block_size,
            codec=lossy_codec(config.cache.coding, config.cache.stores),
        )
        self.kv_identity = _identity_of_kv(self._namespace, model, config)
        check_pack_files(config.cache.stores, self.kv_identity)
        self._eos = frozenset(model.eos_token_ids)
        self._grammars = Grammars(model.tokenizer.own, self.info.vocab_size, model.eos_token_ids)
        self.sampling_defaults = model.sampling_defaults
        self._identity = model.identity
        self._weights = model.weights
        self._copier = copier
        self._events = BlockLog() if config.events else None
        self._cache = self._runner.open_cache(config.cache, copier, self._events)
        auditor = Auditor(config.audit, self._cache.metrics)
        self._quarantine = auditor.quarantine
        shared = self._cache, self._runner, self.info
        self._scheduler = Scheduler(
            *shared,
            Audits(auditor, *shared, self._rename),
            config.max_running,
            config.follow_loads,
            config.meet_loads,
        )
        self._inbox = Inbox(config.max_queue + config.max_running)
        self._process = OwnerProcess()
        self._thread: Thread | None = None
        self._stop = False
        self._runner.warm_up(self.info, self._cache.observe_prefill)
        if self._events is not None:
            self._publisher = Publisher(
                self._events, config.events, config.events_replay, config.events_topic
            )
            chunk_blocks = config.chunk_tokens // config.block_size
            self._publisher.start(self._cache.block_events(chunk_blocks))
        # Do not write to storage under an unverified name: it would persist if it is wrong.
        self._cache.let_archive(model.identity.basis is Basis.READ)
        if self._weights is not None and model.identity.basis is Basis.REMEMBERED:
            self._weights.check(lambda found: self._inbox.put(partial(self._hear, found)))

    # -- for callers on any thread ----------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        salt: str = "",
        on_token: Callable[[Token], None] | None = None,
        on_done: Callable[[Completion], None] | None = None,
        explain: bool = False,
        on_stored: Callable[[PrefixStored], None] | None = None,
        hint: Hint | None = None,
        audit: bool = False,
        on_prompt: Callable[[Sequence[Token]], None] | None = None,
    ) -> RequestHandle:
        """Queue a request.

        prompt: token ids.
        salt: requests share KV only under equal salts.
        explain: include the source of the prompt's KV in the completion.
        hint: hints about its conversation; see ``kvtier.core.hints``.
        audit: audit its hit, whatever the share of hits that are audited.
        on_token, on_done: called on the engine thread; they must return fast.
        on_prompt: the same, once, with the prompt's tokens if ``prompt_logprobs`` is set.
        on_stored: the same, for each copy that stored computed blocks, also after the end.

        Raises ``RequestError`` for an invalid request, ``EngineBusy`` if the queue is full,
        ``Closed`` after ``close`` and in a forked child.
        """
        self._process.must_be_here("the engine")
        params = params or SamplingParams()
        self._refuse_bad(prompt, params)
        labels = self._labels(prompt, params)
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        shaper = params.shaper(prompt, ends, self.info.vocab_size)
        request = Request(
            prompt=list(prompt),
            params=params,
            salt=salt,
            labels=labels,
            on_token=on_token,
            on_done=partial(self._note_done, on_done),
            sampler=Sampler(params, shaper),
            ends=ends,
            on_prompt=on_prompt,
            wants_explanation=explain,
            on_stored=on_stored,
            hint=hint,
            wants_audit=audit,
        )
        self._inbox.let_in()
        self._compute_keys(labels, salt)
        self._inbox.put(request)
        return RequestHandle(request, self._abort)

    def preview(
        self, prompts: Sequence[tuple[Sequence[int], SamplingParams]], *, salt: str = ""
    ) -> Future[list[Preview]]:
        """Find out what each of some prompts would cost if it were submitted now. Changes nothing.

        Raises ``RequestError`` as ``submit`` does.
        """
        for prompt, params in prompts:
            self._refuse_bad(prompt, params)
        asked = [(self._labels(prompt, params), len(prompt)) for prompt, params in prompts]
        for labels, _ in asked:
            self._compute_keys(labels, salt)

        def preview() -> list[Preview]:
            namespace = self.namespace_of(salt)
            return [self._scheduler.preview(namespace, *prompt) for prompt in asked]

        return self.call_later(preview)

    def _labels(self, prompt: Sequence[int], params: SamplingParams) -> Sequence[Label]:
        """Return the labels of the blocks that a request may reuse."""
        if not self.config.prefix_cache or params.prompt_logprobs is not None:
            return ()
        return grid_labels(prompt, self.info.block_size, self.info.chunk_tokens)

    def _compute_keys(self, labels: Sequence[Label], salt: str) -> None:
        """Hash a long prompt on the calling thread, if its blocks may be looked up in storage."""
        if isinstance(labels, Labels) and self._cache.wants_keys(labels):
            labels.compute_keys(self.namespace_of(salt))

    def grammar(self, lark: str) -> Grammar:
        """Compile a grammar for ``SamplingParams.grammar``; see ``Grammars.compile``."""
        return self._grammars.compile(lark)

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the engine thread, between two steps, and return its result."""
        return self.call_later(function).result()

    def call_later(self, function: Callable[[], T]) -> Future[T]:
        """Schedule ``function`` like ``call``. It runs at once if no engine thread runs."""
        self._process.must_be_here("the engine")
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # the caller does not wait any more
            try:
                future.set_result(function())
            except BaseException as error:  # handed to the caller
                future.set_exception(error)

        if self._thread is None or not self._thread.is_alive():
            run()
        else:
            self._inbox.put(run)
        return future

    def follow_loads(self, is_on: bool) -> None:
        """Change ``EngineConfig.follow_loads`` for later requests. Use it through ``call``."""
        self._scheduler.follow_loads = is_on

    def clear_tier(self, tier: str) -> None:
        """Evict every block that no request holds from ``tier``."""
        self.call(lambda: self._cache.clear(tier))

    def drain(self, timeout_s: float = 60.0) -> bool:
        """Wait until no request runs and every copy has ended. Return False on timeout."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self.call(
                lambda: (
                    not self._scheduler.has_requests and self._cache.drain(end - time.monotonic())
                )
            ):
                return True
            time.sleep(0.002)
        return False

    @property
    def cache(self) -> Cache:
        """The cache; use it only through ``call``."""
        return self._cache

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return max(0, self._inbox.num_unfinished - len(self._scheduler.running))

    @property
    def max_event_descriptors(self) -> int:
        """Descriptors that readers of events may use."""
        return 0 if self._publisher is None else self._publisher.max_descriptors

    def findings(self) -> list[Finding]:
        """Return what is in use, for ``kvtier doctor``."""
        return self._cache.findings()

    # -- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine thread."""
        self._process.must_be_here("the engine")
        self._inbox.must_be_open()
        if self._thread is None:
            self._thread = Thread(target=self._serve, name="kvtier-engine", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # a thread inside torch must not outlive the interpreter

    def close(self, grace_s: float = 0.0) -> None:
        """Refuse new requests, let running ones continue for ``grace_s``, abort the rest, stop.

        In a forked child, which calls this at exit, it does nothing.
        """
        if not self._process.is_here:
            return
        if not self._inbox.close():
            return
        if self._thread is not None:
            end = time.monotonic() + grace_s
            while self._inbox.num_unfinished and time.monotonic() < end:
                time.sleep(0.01)
            self._stop = True
            self._inbox.wake()
            self._thread.join()
        atexit.unregister(self.close)
        if self._weights is not None:
            self._weights.stop()
        self._take_in(wait=False)
        self._scheduler.abort_all()
        self._cache.close()
        self._copier.close()
        if self._publisher is not None:
            self._publisher.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- the engine thread ------------------------------------------------------------------------

    def _serve(self) -> None:
        is_busy = False
        while not self._stop:
            try:
                self._take_in(wait=not is_busy)
                is_busy = self._scheduler.step()
            except Exception as error:  # internal error: no request may wait forever
                logger.exception("step failed")
                self._scheduler.fail_all(f"The engine failed: {error}")
                is_busy = False

    def _note_done(
        self, on_done: Callable[[Completion], None] | None, completion: Completion
    ) -> None:
        self._inbox.note_end()
        if on_done is not None:
            on_done(completion)

    def _take_in(self, wait: bool) -> None:
        """Take requests and calls from the inbox. wait: wait briefly for one."""
        # The end of a copy is noticed by polling: poll again soon.
        patience_s = 0.0005 if self._scheduler.has_requests else IDLE_WAIT_S
        for item in self._inbox.take(patience_s if wait else 0.0):
            if isinstance(item, Request):
                self._settle(item)
                self._scheduler.add(item)
            else:
                item()

    def namespace_of(self, salt: str) -> bytes:
        """Return the namespace of requests with this salt."""
        return self.namespaces_of(salt)[-1]

    def namespaces_of(self, salt: str) -> Sequence[bytes]:
        """Return the namespaces that requests with this salt have had, the present one last."""
        return self._quarantine.names(replace(self._namespace, salt=salt).digest)

    def _settle(self, request: Request) -> None:
        """Set the namespace of a request, which the events know from now on."""
        request.namespace = self.namespace_of(request.salt)
        if self._quarantine.is_closed(request.namespace):
            request.labels = ()
        if self._events is not None:
            self._events.name(request.namespace, request.salt)

    def _rename(self) -> None:
        """Do not use KV any more that an audit has put in quarantine."""
        if self._events is not None:
            self._events.lose()
        self._scheduler.rename(self._settle, fails_answers=False)

    def _hear(self, found: Identity) -> None:
        """Handle the verification of the weights against the remembered identity.

        If they differ, it is unknown whose KV was loaded under the old name. That KV is not used
        any more, and this process does not share the KV that it computes.
        """
        if found.digest == self._identity.digest:
            self._cache.let_archive(True)
            return
        logger.error(
            "the weights are not those that were remembered: KV on disk is not used any more, and "
            "requests that had some begin anew; restart to use it again"
        )
        self._identity = found
        if self._events is not None:
            self._events.lose()
        self._namespace = replace(self._namespace, model=found.digest)
        self._scheduler.rename(self._settle)

    def _abort(self, request: Request) -> None:
        """Abort a request. Thread-safe."""
        self._inbox.put(partial(self._scheduler.abort, request))

    def _refuse_bad(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise ``RequestError`` with one clear sentence for an invalid request."""
        if not prompt:
            raise RequestError("The prompt is empty; give at least one token.")
        if complaint := params.complaint():
            raise RequestError(complaint)
        wanted = len(prompt) + params.max_tokens
        if wanted > self.info.max_model_tokens:
            raise RequestError(
                f"The prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}: "
                f"together {wanted}, but there is room for {self.info.max_model_tokens}; "
                f"shorten the prompt or lower max_tokens.{self.info.context_note}"
            )
        for token_id in (*(token_id for token_id, _ in params.logit_bias), *params.stop_token_ids):
            if not 0 <= token_id < self.info.vocab_size:
                raise RequestError(
                    f"logit_bias or stop_token_ids name the token id {token_id}, which is outside "
                    f"0 .. {self.info.vocab_size - 1}, the vocabulary of {self.info.model_name}."
                )
        if min(prompt) < 0 or max(prompt) >= self.info.vocab_size:
            raise RequestError(
                f"The prompt has token ids outside 0 .. {self.info.vocab_size - 1}, the vocabulary "
                f"of {self.info.model_name}."
            )


def _identity_of_kv(namespace: Namespace, model: LoadedModel, config: EngineConfig) -> KVIdentity:
    facts = {
        "weights": namespace.model,
        "made_by": namespace.revision,
        "dtype": namespace.dtype,
        "layout": namespace.layout,
        "block_size": str(namespace.block_size),
        "chunk_tokens": str(config.chunk_tokens),
        "codec": namespace.codec,
    }
    group = model.profile.pool_group(config.block_size)
    return KVIdentity(model.name, facts, namespace.digest, group)


def _device_name(wanted: str) -> str:
    """Return the device to run on; "auto" is torch's accelerator, else the CPU."""
    if wanted != "auto":
        try:
            torch.device(wanted)
        except RuntimeError as error:
            raise DeviceError(f"device: {wanted!r} is unknown to torch: {error}") from error
        return wanted
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


def _capacity(config: EngineConfig, model: LoadedModel) -> tuple[int, int]:
    """Return the bytes of the device's pool, and its blocks."""
    capacity = parse_size(config.device_capacity, "device_capacity")
    return capacity, capacity // model.profile.pool_group(config.block_size).bytes_per_block


def _limits(config: EngineConfig, model: LoadedModel) -> dict[str, int]:
    """Return the longest context by what limits it.

    Raises ``ConfigError`` if the device's pool has no room for a chunk.
    """
    capacity, num_blocks = _capacity(config, model)
    room_blocks = model.profile.room(num_blocks, config.block_size, config.chunk_tokens)
    room = room_blocks * config.block_size
    if room <= config.chunk_tokens:
        num_others = num_blocks - room_blocks
        with_others = f" and {num_others} blocks of state" if num_others else ""
        block_bytes = model.profile.pool_group(config.block_size).bytes_per_block
        raise ConfigError(
            f"device_capacity: {capacity / 2**20:.1f} MiB is room for {num_blocks} blocks of "
            f"{block_bytes} bytes, less than one chunk of "
            f"{config.chunk_tokens} tokens{with_others}; raise it"
        )
    limits = {"the model": model.max_tokens, "device_capacity": room}
    if config.max_model_tokens:
        limits["max_model_tokens"] = config.max_model_tokens
    return limits


def _context_note(limits: Mapping[str, int]) -> str:
    """Return which setting limits the context below the model's limit; "" if none does.

    limits: tokens, by setting; the model's comes first.
    """
    setting = min(limits, key=lambda each: limits[each])
    model, most = next(iter(limits.items()))
    if setting == model:
        return ""
    return f" The limit of {limits[setting]} tokens is set by {setting}; the model takes {most}."
