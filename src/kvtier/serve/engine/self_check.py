"""Check at load: a runner computes what transformers computes, else nothing is served."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
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
from kvtier.serve.engine.runner import kept_logits

logger = logging.getLogger(__name__)

NOT_SERVED = " is not served: "

REFERENCE = "eager"
"""transformers' plain attention: the others leave out soft caps or sinks of some models."""

NUM_CHUNKS = 2.5
"""Shortest prompt, in chunks: two that continue a context, one of them shorter than the grid."""

FIRST, TAIL = 4, 8
"""Tokens that are compared behind each edge of a chunk, where a lost state or window shows most,
and at the end of each of the last two chunks."""

NUM_DECODED = 8
"""Sequences of the decode step that end at the prompt's end."""

SEQUENCE_TOKENS = 8192
"""Tokens of a sequence whose device memory is told."""

TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference of logits, relative to the token's largest logit.

In float32 it is that of the worst token. In float16 and bfloat16 it is that of the median token of
each place, since rounding sends single tokens to other experts, in both ways of computing. There it
only counts if the model can't be computed in float32.
"""

MAX_ROUNDING = 3.0
"""Largest difference from float32, relative to that of transformers' own logits of that dtype."""

MIN_SHARE = 0.25
"""Share of ``TOLERANCES`` that is always allowed in 16 bits: where rounding sends an early token to
another expert, all later ones attend to it."""


NUM_PROMPTS = 3
"""Prompts of which one has to pass in 16 bits, where an expert may be another one by chance. In
float32 each one has to."""


class WrongModelError(ConfigError):
    """A runner does not compute a model as transformers does."""


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Result of a check that passed.

    difference: of logits from transformers' own, relative to the token's largest logit: that of
    the worst token in float32, else of the median token of the worst place.
    cpu_s: processor time of all ways together.
    """

    num_tokens: int
    difference: float
    tolerance: float
    cpu_s: float


class _Plan:
    """A prompt, and the tokens of it whose logits are compared.

    kept: positions in its chunks. batches: lengths of the sequences of decode steps.
    positions: of all compared tokens.
    places: of each of them: "first" or "last" of a chunk, or decoded in a "batch" or "alone".
    """

    def __init__(self, vocab_size: int, chunk_tokens: int, num_tokens: int, seed: int) -> None:
        self.prompt = _prompt(vocab_size, num_tokens, seed)
        self.chunk_tokens = chunk_tokens
        edges = [*range(chunk_tokens, num_tokens, chunk_tokens)]
        first = {edge + at for edge in edges for at in range(FIRST)} & {*range(num_tokens)}
        ends = [*edges, num_tokens]
        last = {end - 1 for end in ends}
        last |= {max(0, end - 1 - at) for end in ends[-2:] for at in range(TAIL)}
        self.kept = sorted(first | last)
        behind = {edge + at for edge in (edges[:1] + edges[-1:]) for at in (1, 2, 3)}
        batch = {length for length in behind if length <= num_tokens}
        batch |= {max(1, num_tokens - at) for at in range(NUM_DECODED)}
        alone = [edge + 1 for edge in edges[-1:]] + [num_tokens]
        self.batches = [sorted(batch), *([length] for length in alone)]
        self.positions = self.kept + [length - 1 for batch in self.batches for length in batch]
        self.places = ["first" if position in first else "last" for position in self.kept]
        self.places += ["batch"] * len(batch) + ["alone"] * len(alone)


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


def choose_runner(
    name: str,
    model: LoadedModel,
    block_size: int,
    chunk_tokens: int,
    limit: Callable[[LoadedModel], int],
) -> tuple[LoadedModel, SelfCheck]:
    """Return the model with the first runner that computes it as transformers does.

    limit: return the longest context that the engine takes.

    Raises ``ConfigError`` if there is none.
    """

    def check(model: LoadedModel) -> tuple[LoadedModel, SelfCheck]:
        num_tokens = num_check_tokens(model, chunk_tokens, limit(model))
        return model, check_model(name, model, block_size, chunk_tokens, num_tokens)

    try:
        return check(model)
    except WrongModelError as error:
        if model.profile.slow_because:
            raise
        why = str(error).partition(NOT_SERVED)[2].partition(";")[0]
        profile = measure_model(model.module, name, f"with paged attention {why}")
        return check(replace(model, profile=profile))


@torch.inference_mode()
def check_model(
    name: str, model: LoadedModel, block_size: int, chunk_tokens: int, num_tokens: int
) -> SelfCheck:
    """Compare logits of one prompt: in one shot by transformers, and on the grid by the runner.

    They are compared at the first and the last tokens of chunks, and for decode steps of one and of
    several sequences. A model of 16 bits is computed with its weights in float32 first. Then it is
    computed as it is, and may differ from float32 about as much as by transformers' own attention.

    Raises ``WrongModelError`` with the difference if it is too large.
    """
    began = time.process_time()
    module = model.module
    vocab_size = module.config.get_text_config(decoder=True).vocab_size
    is_exact = module.dtype is torch.float32
    for seed in range(1 if is_exact else NUM_PROMPTS):
        plan = _Plan(vocab_size, chunk_tokens, num_tokens, seed)
        exact = None if is_exact else _in_float32(name, model, plan, block_size)
        try:
            difference, tolerance = _compare(name, model, plan, block_size, exact)
            break
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"model: {name!r}{NOT_SERVED}{reason(error)}") from error
        except WrongModelError:
            if exact is None or seed + 1 == NUM_PROMPTS:
                raise
    return SelfCheck(num_tokens, difference, tolerance, time.process_time() - began)


def _in_float32(name: str, model: LoadedModel, plan: _Plan, block_size: int) -> torch.Tensor | None:
    """Check a model of 16 bits with its weights in float32. Return transformers' own logits.

    None, with a warning, where it can't be computed in float32: it is only checked as it is.
    """
    module = model.module
    try:
        with in_float32(module):
            try:
                expected = _one_shot(name, module, plan)
            except ConfigError as error:
                raise NoFloat32Error(str(error.__cause__)) from error
            wide = measure_model(module, name, model.profile.slow_because)
            _compare(name, replace(model, profile=wide), plan, block_size, None)
            return expected
    except (NoFloat32Error, torch.OutOfMemoryError) as error:
        logger.warning(
            "model: %r is checked in %s only, where rounding hides small errors, because %s",
            name,
            str(module.dtype).removeprefix("torch."),
            reason(error) if isinstance(error, torch.OutOfMemoryError) else error,
        )
        return None


def _compare(
    name: str, model: LoadedModel, plan: _Plan, block_size: int, exact: torch.Tensor | None
) -> tuple[float, float]:
    """Return the difference of a runner's logits from transformers' own, and the largest allowed.

    The runner has just the blocks for it.

    exact: logits in float32 of a model of 16 bits, with which both are compared.
    """
    module, profile = model.module, model.profile
    own = _one_shot(name, module, plan)
    num_tokens = len(plan.prompt)
    num_blocks = profile.pool_blocks(-(-num_tokens // block_size), block_size, plan.chunk_tokens)
    runner = profile.make_runner(module, block_size, num_blocks, plan.chunk_tokens)
    try:
        found = runner.rehearse(plan.prompt, plan.kept, plan.batches)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # any type: models differ in what they expect of a cache
        why = str(error) if isinstance(error, ConfigError) else reason(error)
        raise WrongModelError(
            f"model: {name!r}{NOT_SERVED}it can't continue a prompt ({why})"
        ) from error
    difference, tolerance = _judge(plan, found, own, exact, module.dtype)
    if not difference <= tolerance:  # NaN too
        raise WrongModelError(
            f"model: {name!r}{NOT_SERVED}its logits for a prompt of {num_tokens} tokens differ "
            f"from transformers' own by {difference:.1e} of their scale, above {tolerance:.0e}; "
            "the embedded engine does not compute this model as it is meant"
        )
    return difference, tolerance


def _judge(
    plan: _Plan,
    found: torch.Tensor,
    own: torch.Tensor,
    exact: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[float, float]:
    """Return the difference that is worst against what is allowed there, and the latter."""
    off = _relative(found, own if exact is None else exact)
    if dtype is torch.float32 or off.isnan().any():
        return float(off.max()), TOLERANCES[dtype]
    results = []
    for place in dict.fromkeys(plan.places):
        rows = torch.tensor([place == other for other in plan.places])
        difference, allowed = float(off[rows].median()), TOLERANCES[dtype]
        if exact is not None:
            rounding = float(_relative(own, exact)[rows].median())
            allowed = max(MAX_ROUNDING * rounding, allowed * MIN_SHARE)
        results.append((difference / allowed, difference, allowed))
    return max(results)[1:]


def _prompt(vocab_size: int, num_tokens: int, seed: int) -> list[int]:
    """Return tokens from all of the vocabulary, the same every time."""
    made = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(vocab_size, (num_tokens,), generator=made).tolist()
    return tokens


def _relative(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return each token's largest difference, relative to its largest logit."""
    scale = expected.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny)
    return (found - expected).abs().amax(-1) / scale


def _one_shot(name: str, module: PreTrainedModel, plan: _Plan) -> torch.Tensor:
    """Return the compared tokens' logits by transformers' own attention: float32, CPU."""
    ids = torch.tensor([plan.prompt], device=module.device)
    with attention_of(module, REFERENCE):
        try:
            logits = kept_logits(module, plan.positions, input_ids=ids, use_cache=False)
        except Exception as error:  # any type: transformers fails on its own
            raise ConfigError(
                f"model: {name!r}{NOT_SERVED}transformers itself can't run a prompt of "
                f"{len(plan.prompt)} tokens ({reason(error)})"
            ) from error
    return logits.float().cpu()


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
        model, checked = choose_runner(
            name, model, BLOCK_SIZE, CHUNK_TOKENS, lambda model: model.max_tokens
        )
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
