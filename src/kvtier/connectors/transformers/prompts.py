"""Calls of a model's ``forward`` that begin a prompt, and the reasons why others do not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.utils._device import DeviceContext
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from kvtier.connectors.transformers.cache_layers import (
    CacheLayers,
    UnsupportedModelError,
    cache_argument,
)
from kvtier.connectors.transformers.images import (
    DIGEST_TOKENS,
    FEATURES,
    TOKEN_TYPES,
    UNDIVIDED,
    Images,
)
from kvtier.connectors.transformers.reach import has_hooks

HANDLED = {
    "input_ids",
    "attention_mask",
    "position_ids",
    "use_cache",
    "logits_to_keep",
    "return_dict",
}
"""Arguments of ``forward`` that are understood, beside the cache and images. Others must be None,
False or empty."""

STEADY_ROTARY = {"default", "linear", "yarn", "llama3", "proportional"}
"""Rotary embeddings whose frequencies do not depend on the length of the context."""


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """The prompts of one call, which are to be computed into an empty cache.

    Attributes:
        rows: token ids of each, without its padding.
        num_tokens: length of the rows in the call, with padding on the left.
        cache: where their KV is wanted.
        num_logits: last tokens whose logits are wanted.
        device: of the ids.
        images: of the only row; None for text.
    """

    rows: list[list[int]]
    num_tokens: int
    cache: DynamicCache
    num_logits: int
    device: torch.device
    images: Images | None = None


class PromptReader:
    """Recognises the calls that begin prompts.

    Raises ``UnsupportedModelError`` if no call of the model's ``forward`` can be one.

    cache_name: name of the cache among the arguments of ``forward``.
    """

    def __init__(self, model: PreTrainedModel, forward: Callable[..., Any]) -> None:
        parameters = inspect.signature(forward).parameters
        self._names = [
            name
            for name, each in parameters.items()
            if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        if model.config.is_encoder_decoder:
            raise UnsupportedModelError("it is an encoder and a decoder")
        self.cache_name = cache_argument(forward)
        if missing := {"input_ids", self.cache_name, "logits_to_keep"} - {*self._names}:
            raise UnsupportedModelError(f"its forward takes no {', '.join(sorted(missing))}")
        text = model.config.get_text_config(decoder=True)
        for kind in _rotary_kinds(getattr(text, "rope_parameters", None)):
            if kind not in STEADY_ROTARY:
                raise UnsupportedModelError(
                    f"its rotary embeddings ({kind}) may depend on the length of the context"
                )

    @property
    def takes_positions(self) -> bool:
        """Whether ``forward`` has an argument ``position_ids``."""
        return "position_ids" in self._names

    def named(self, positional: tuple[object, ...], named: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by their names, the cache by ``cache_name``."""
        call = dict(zip(self._names, positional, strict=False)) | named
        if self.cache_name not in call and "past_key_values" in call:
            call[self.cache_name] = call.pop("past_key_values")  # its name before transformers 5.24
        return call

    def read(
        self, model: PreTrainedModel, layers: CacheLayers, call: Mapping[str, Any]
    ) -> PromptBatch | str:
        """Return the prompts that a call begins, or the reason why it is passed through."""
        call = {
            name: value for name, value in call.items() if not _is_absent(name, value, model.config)
        }
        reason = _odd_arguments(call, self.cache_name) or _odd_settings(model, call)
        if reason := reason or odd_state(model):
            return reason
        if not layers.fit_model(model):
            return "the model has another dtype or device than when it was attached"
        cache = call.get(self.cache_name)
        if cache is None:
            cache = layers.new_cache()
        elif type(cache) is not DynamicCache:
            return f"a {type(cache).__name__}"
        ids, mask = call.get("input_ids"), call.get("attention_mask")
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            return "no token ids"
        if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape == ids.shape:
            rows, num_padding = _unpadded(ids, mask)
        elif mask is None:
            rows, num_padding = ids.tolist(), [0] * len(ids)
        else:
            return "a mask of its own"
        if rows is None:
            return "padding that is not on the left"
        positions, images = call.get("position_ids"), None
        has_default = _has_default_positions(positions, num_padding, ids)
        if FEATURES in call:
            types = call.get(TOKEN_TYPES)
            if types is not None and (has_default or positions is None or positions.ndim < 3):
                return f"{TOKEN_TYPES} was given"  # masks rest on them, not only positions
            if len(rows) > 1 or any(num_padding) or layers.block_tokens < DIGEST_TOKENS:
                return UNDIVIDED
            try:
                images = Images(
                    call[FEATURES],
                    ids,
                    model.config,
                    None if has_default else positions,
                    types,
                )
            except ValueError as error:
                return str(error)
        elif TOKEN_TYPES in call:
            return f"{TOKEN_TYPES} was given"
        elif not has_default:
            return "custom position_ids"
        num_logits = call.get("logits_to_keep", 0)
        if not isinstance(num_logits, int) or not 1 <= num_logits <= min(map(len, rows)):
            return "logits of the whole prompt"
        if not layers.fits(cache):
            return "cache layers of another kind"
        return PromptBatch(rows, ids.shape[1], cache, num_logits, ids.device, images)


def _rotary_kinds(parameters: object) -> set[str]:
    """Return the types of rotary embeddings in ``rope_parameters``, also where it is by layer."""
    if not isinstance(parameters, Mapping):
        return set()
    if "rope_type" in parameters:
        return {str(parameters["rope_type"])}
    return {kind for parameter in parameters.values() for kind in _rotary_kinds(parameter)}


def _is_absent(name: str, value: object, config: PreTrainedConfig) -> bool:
    """Whether an argument has no effect: ``generate`` and processors pass some for text, too."""
    if isinstance(value, torch.Tensor):
        # For text alone, the parts that a multimodal model's tokens may belong to are all 0.
        is_multimodal = config.get_text_config(decoder=True) is not config
        return name in (TOKEN_TYPES, "token_type_ids") and is_multimodal and not value.any()
    return value is None or (isinstance(value, Mapping | list | tuple) and not value)


def _odd_arguments(call: Mapping[str, Any], cache_name: str) -> str:
    for name, value in call.items():
        if name not in {*HANDLED, FEATURES, TOKEN_TYPES, cache_name} and value is not False:
            return f"{name} was given"
    if call.get("use_cache") is False:
        return "use_cache is off"
    return "tuples are wanted" if call.get("return_dict") is False else ""


def _odd_settings(model: PreTrainedModel, call: Mapping[str, Any]) -> str:
    """Return the setting of a configuration that requires output that a chunk lacks, or ""."""
    config = model.config
    if call.get("use_cache") is None and getattr(config, "use_cache", None) is False:
        return "config.use_cache is off"
    if call.get("return_dict") is None and getattr(config, "return_dict", None) is False:
        return "config.return_dict is off"
    for settings in (vars(config), vars(config.get_text_config(decoder=True))):
        for name, value in settings.items():
            # Selections of hidden states are numbers or lists.
            name = name.removeprefix("_")
            if name.startswith("output_") and (
                value is True or (value and name == "output_hidden_states")
            ):
                return f"config.{name} is set"
    return ""


def odd_state(model: PreTrainedModel) -> str:
    """Return why KV can neither be restored nor kept now; "" if it can."""
    if torch.compiler.is_compiling():
        return "the model is being compiled"
    if model.training:
        return "the model is in training mode"
    if torch.is_grad_enabled():
        return "gradients are recorded"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast is on"
    if torch._C._len_torch_dispatch_stack() or (
        torch._C._functorch.peek_interpreter_stack() is not None
    ):
        return "a mode of torch is on"
    if torch._C._len_torch_function_stack() and not all(
        isinstance(mode, DeviceContext)  # of torch.set_default_device: it computes nothing
        for mode in torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    ):
        return "a mode of torch is on"
    every = (modules._global_forward_hooks, modules._global_forward_pre_hooks)
    return "forward hooks" if any(has_hooks(hooks.values()) for hooks in every) else ""


def _unpadded(ids: torch.Tensor, mask: torch.Tensor) -> tuple[list[list[int]] | None, list[int]]:
    """Return the rows without padding on the left, and its lengths; None for other padding."""
    is_token = mask != 0
    num_tokens = is_token.sum(dim=1).tolist()
    width = ids.shape[1]
    firsts = [width - num for num in num_tokens]
    starts = torch.tensor(firsts, device=ids.device)[:, None]
    if not torch.equal(is_token, torch.arange(width, device=ids.device)[None] >= starts):
        return None, []
    return [row[first:] for row, first in zip(ids.tolist(), firsts, strict=True)], firsts


def _has_default_positions(
    positions: torch.Tensor | None, num_padding: list[int], ids: torch.Tensor
) -> bool:
    """Whether every token's position is its index in its prompt, not counting padding.

    positions: [num_prompts, num_tokens], or several such, for text and the axes of images.
    """
    if positions is None:
        return not any(num_padding)  # without them, transformers counts padding
    if positions.ndim < 2 or positions.shape[-1] != ids.shape[1]:
        return False
    starts = torch.tensor(num_padding, device=ids.device)[:, None]
    default = torch.arange(ids.shape[1], device=ids.device)[None] - starts
    return bool(((positions == default) | (default < 0)).all())
