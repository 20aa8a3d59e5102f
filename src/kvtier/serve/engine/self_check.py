"""Check at load: the runner computes what transformers computes, else nothing is served."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from kvtier.cache.states import SNAPSHOT_TOKENS
from kvtier.connectors.transformers.cache_layers import NoFloat32Error, in_float32
from kvtier.core.config import BLOCK_SIZE, CHUNK_TOKENS
from kvtier.core.errors import ConfigError
from kvtier.devices import Finding
from kvtier.serve.engine.models import LoadedModel, load_model, measure_model
from kvtier.serve.engine.profile import attention_of, reason
from kvtier.serve.engine.runner import Runner

logger = logging.getLogger(__name__)

REFERENCE = "eager"
"""transformers' plain attention: the others leave out soft caps or sinks of some models."""

NUM_CHUNKS = 2.5
"""Shortest prompt, in chunks: two that continue a context, one of them shorter than the grid."""

TAIL, NUM_DECODED = 8, 8
"""Tokens that are compared of each of the last two chunks, and sequences of the decode step."""

SEQUENCE_TOKENS = 8192
"""Tokens of a sequence whose device memory is told."""

TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference of logits, relative to the token's largest logit.

In float16 and bfloat16 it is that of the median token: rounding sends single tokens to other
experts, in both ways of computing. Such models are checked in float32 first, if it fits.
"""


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Result of a check that passed.

    difference: of logits from transformers' own, relative to the token's largest logit: that of
    the worst token in float32, else of the median token.
    cpu_s: processor time of both ways together.
    """

    num_tokens: int
    difference: float
    tolerance: float
    cpu_s: float


def num_check_tokens(model: LoadedModel, chunk_tokens: int, limit: int) -> int:
    """Return the length of the prompt: longer than any window, if ``limit`` allows it.

    Windows count that the configuration names, even if attention is not told of them.
    """
    text = model.module.config.get_text_config(decoder=True)
    named = [
        given
        for name, given in text.to_dict().items()
        if ("window" in name or "attention_chunk" in name) and type(given) is int
    ]
    reach = max([*model.profile.windows, *named, 0])
    wanted = max(int(chunk_tokens * NUM_CHUNKS), reach + chunk_tokens + chunk_tokens // 2)
    return min(wanted, limit)


def check_in_float32(
    name: str, model: LoadedModel, block_size: int, chunk_tokens: int, num_tokens: int
) -> None:
    """Check a model of 16 bits as ``check_model`` does, with its weights in float32.

    It is checked as it is only, with a warning, where float32 takes too much memory.
    """
    module = model.module
    if module.dtype is torch.float32:
        return
    try:
        with in_float32(module):
            try:
                _one_shot(name, module, [0], [0])
            except ConfigError as error:
                raise NoFloat32Error(str(error.__cause__)) from error
            exact = replace(model, profile=measure_model(module, name))
            _check(name, exact, block_size, chunk_tokens, num_tokens)
    except (NoFloat32Error, torch.OutOfMemoryError) as error:
        logger.warning(
            "model: %r is checked in %s only, where rounding hides small errors, because %s",
            name,
            str(module.dtype).removeprefix("torch."),
            reason(error) if isinstance(error, torch.OutOfMemoryError) else error,
        )


@torch.inference_mode()
def check_model(
    name: str, model: LoadedModel, runner: Runner, chunk_tokens: int, num_tokens: int
) -> SelfCheck:
    """Compare logits of one prompt: in one shot by transformers, and on the grid by ``runner``.

    They are compared at the end of each chunk, and for decode steps. The pool's first blocks are
    overwritten.

    Raises ``ConfigError`` with the difference if it is too large.
    """
    began = time.process_time()
    module = model.module
    prompt = _prompt(module.config.get_text_config(decoder=True).vocab_size, num_tokens)
    ends = [*range(chunk_tokens, num_tokens, chunk_tokens), num_tokens]
    starts = [0, *ends[:-1]]
    keep = [1] * (len(ends) - 2) + [TAIL] * 2
    keep = [min(few, end - start) for few, start, end in zip(keep, starts, ends, strict=False)]
    short = min(chunk_tokens + 3, num_tokens)  # one sequence ends just past a chunk
    decoded = [short, *range(num_tokens, max(0, num_tokens - NUM_DECODED), -1)]
    positions = [at for few, end in zip(keep, ends, strict=True) for at in range(end - few, end)]
    expected = _one_shot(name, module, prompt, positions + [end - 1 for end in decoded])
    try:
        found = runner.rehearse(prompt, keep, decoded)
    except ConfigError:
        raise
    except Exception as error:  # any type: models differ in what they expect of a cache
        raise ConfigError(
            f"model: {name!r} is not served: it can't continue a prompt ({reason(error)})"
        ) from error
    off = _relative(found, expected)
    if module.dtype is torch.float32:
        difference = float(off.max())
    else:
        tail = off[len(positions) - sum(keep[-2:]) : len(positions)]
        difference = max(float(tail.median()), float(off[len(positions) :].median()))
    tolerance = TOLERANCES[module.dtype]
    if not difference <= tolerance:  # NaN too
        raise ConfigError(
            f"model: {name!r} is not served: its logits for a prompt of {num_tokens} tokens differ "
            f"from transformers' own by {difference:.1e} of their scale, above {tolerance:.0e}; "
            "the embedded engine does not compute this model as it is meant"
        )
    return SelfCheck(num_tokens, difference, tolerance, time.process_time() - began)


def _check(
    name: str, model: LoadedModel, block_size: int, chunk_tokens: int, num_tokens: int
) -> SelfCheck:
    """Check a model with a runner that has just the blocks for it."""
    num_blocks = -(-num_tokens // block_size)
    num_blocks = model.profile.pool_blocks(num_blocks, block_size, chunk_tokens)
    runner = model.profile.make_runner(model.module, block_size, num_blocks, chunk_tokens)
    return check_model(name, model, runner, chunk_tokens, num_tokens)


def _prompt(vocab_size: int, num_tokens: int) -> list[int]:
    """Return tokens from all of the vocabulary, the same every time."""
    made = torch.Generator().manual_seed(0)
    tokens: list[int] = torch.randint(vocab_size, (num_tokens,), generator=made).tolist()
    return tokens


def _relative(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return each token's largest difference, relative to its largest logit."""
    scale = expected.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny)
    return (found - expected).abs().amax(-1) / scale


def _one_shot(
    name: str, module: PreTrainedModel, prompt: Sequence[int], positions: Sequence[int]
) -> torch.Tensor:
    """Return the logits at ``positions`` by transformers' own attention: float32, CPU."""
    at = torch.tensor(positions, device=module.device)
    can_choose = "logits_to_keep" in inspect.signature(module.forward).parameters
    options = {"logits_to_keep": at} if can_choose else {}
    with attention_of(module, REFERENCE):
        try:
            output = module(
                input_ids=torch.tensor([prompt], device=module.device), use_cache=False, **options
            )
        except Exception as error:  # any type: transformers fails on its own
            raise ConfigError(
                f"model: {name!r} is not served: transformers itself can't run a prompt of "
                f"{len(prompt)} tokens ({reason(error)})"
            ) from error
    logits: torch.Tensor = output.logits[0]
    return (logits if can_choose else logits[at]).float().cpu()


# -- for kvtier doctor -----------------------------------------------------------------------------


def examine(name: str, device_name: str, dtype_name: str = "auto") -> tuple[Finding, ...]:
    """Return what the embedded engine would make of a model; it is loaded and checked."""
    device = torch.device(device_name)
    try:
        model = load_model(name, device, dtype_name)
    except ConfigError as error:
        return (Finding("served", "no", str(error).removeprefix("model: ")),)
    if model.weights is not None:
        model.weights.stop()
    try:
        num_tokens = num_check_tokens(model, CHUNK_TOKENS, model.max_tokens)
        check_in_float32(name, model, BLOCK_SIZE, CHUNK_TOKENS, num_tokens)
        checked = _check(name, model, BLOCK_SIZE, CHUNK_TOKENS, num_tokens)
    except ConfigError as error:
        return (*_facts(model), Finding("served", "no", str(error).removeprefix("model: ")))
    runner, why = model.profile.runner_name, model.profile.slow_because
    slow = f" (one sequence at a time, because {why})" if why else ""
    told = (
        f"a prompt of {checked.num_tokens} tokens in one shot by transformers and in chunks of "
        f"{CHUNK_TOKENS} by the engine; allowed: {checked.tolerance:.0e}; "
        f"{checked.cpu_s * 1e3:.0f} ms of CPU time"
    )
    return (
        *_facts(model),
        Finding("self-check", f"{checked.difference:.1e} of the logits' scale", told),
        Finding("served", "yes", f"by the {runner} runner{slow}: kvtier serve PATH"),
    )


def _facts(model: LoadedModel) -> tuple[Finding, ...]:
    profile = model.profile
    num_parameters = sum(weight.numel() for weight in model.module.parameters())
    snapshots = []
    if profile.bytes_per_snapshot:
        size = f"{profile.bytes_per_snapshot / 1024:.1f} KiB"
        note = f"at a prompt's end, where prompts part, and about every {SNAPSHOT_TOKENS} tokens"
        snapshots.append(Finding("snapshot of the state", size, note))
    return (
        Finding("type", model.module.config.model_type, f"{num_parameters / 1e6:,.1f} M weights"),
        Finding("attention", profile.features(), f"{profile.num_layers} layers with KV"),
        Finding(
            "KV of a token",
            f"{profile.bytes_per_token / 1024:.1f} KiB",
            f"{str(model.module.dtype).removeprefix('torch.')}, every token of every layer",
        ),
        *snapshots,
        *_window_facts(model),
        Finding("longest context", f"{model.max_tokens} tokens"),
    )


def _window_facts(model: LoadedModel) -> Iterator[Finding]:
    """Yield the device memory of a running sequence, if windows limit it."""
    profile = model.profile
    whole, part = profile.group(BLOCK_SIZE), profile.pool_group(BLOCK_SIZE)
    if whole == part:
        return
    num_blocks = -(-min(model.max_tokens, SEQUENCE_TOKENS) // BLOCK_SIZE)
    held = profile.pool_blocks(num_blocks, BLOCK_SIZE, CHUNK_TOKENS) * part.bytes_per_block
    yield Finding(
        "device memory of a sequence",
        f"{held / 2**20:,.1f} MiB",
        f"{num_blocks * BLOCK_SIZE} tokens; {num_blocks * whole.bytes_per_block / 2**20:,.1f} MiB "
        "with the KV that windows have passed, which goes to the tiers below",
    )
