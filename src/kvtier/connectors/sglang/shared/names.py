"""Names of SGLang's pages outside the process, by the weights and the code that compute them.

SGLang's own code is known by its version. That of plug-ins, of models and attention back ends that
are registered from elsewhere, of hooks in a forward, and of another platform is known by its files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import sglang
import transformers
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention import attention_registry
from sglang.srt.models.registry import ModelRegistry

from kvtier.connectors.common.names import BlockNames
from kvtier.connectors.common.plugins import plugin_modules
from kvtier.connectors.sglang.shared.identity import engine_digest, sources
from kvtier.connectors.sglang.shared.ranks import RankConfig
from kvtier.identity import UnknownCodeError, code_digest, process_start_ns

KNOWN = ("kvtier", "sgl_kernel", "sglang", "torch", "transformers")
"""Packages that SGLang's version and kvtier's formats identify, or that are named by a version."""
TRANSFORMERS = "sglang.srt.models.transformers"
"""Module of the models that SGLang runs by the code of Transformers."""


class PageNames(BlockNames):
    """Names of the pages of one SGLang engine.

    Args:
        options: SGLang's ``ServerArgs``; None if unknown.
        salt: the namespace setting.
    """

    def __init__(self, options: object, salt: str = "") -> None:
        def digest_of(weights: str) -> bytes:
            return engine_digest(weights, sglang.__version__, options, salt, self._code)

        super().__init__(digest_of, salt)
        self._options = options
        self._code = ""

    def settle_engine(self, config: RankConfig) -> None:
        """Identify the weights and the code that KV is computed with."""
        try:
            self._code = engine_code(self._options)
        except UnknownCodeError as error:
            self.disown(str(error))
        else:
            self.settle(sources(self._options, config))


def engine_code(options: object) -> str:
    """Return a text that identifies the code from outside SGLang; "" if there is none.

    options: SGLang's ``ServerArgs``; None if unknown.

    Raises:
        UnknownCodeError: some of it can't be identified.
    """
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    names = [name.strip() for name in allowed.split(",")] if allowed else None
    modules = [
        *plugin_modules("sglang.srt.plugins", names),
        *_platform(),
        *(base.__module__ for model in ModelRegistry.models.values() for base in model.__mro__),
        *(backend.__module__ for backend in attention_registry.ATTENTION_BACKENDS.values()),
        *_hooks(options),
    ]
    digest = code_digest(filter(None, modules), KNOWN, process_start_ns())
    version = f"transformers {transformers.__version__}" if _uses_transformers(options) else ""
    hooks = json.dumps(getattr(options, "forward_hooks", None) or "")
    return " ".join(filter(None, (version, digest, hooks.strip('"'))))


def _platform() -> list[str]:
    """Return the module of SGLang's platform; nothing for a version without platforms."""
    try:
        from sglang.srt.platforms import current_platform
    except ImportError:
        return []
    return [type(current_platform).__module__]


def _hooks(options: object) -> Iterator[str]:
    """Yield the modules of the hooks that SGLang's option ``--forward-hooks`` puts into a model."""
    for hook in getattr(options, "forward_hooks", None) or ():
        yield str(hook.get("hook_factory") or "").partition(":")[0]


def _uses_transformers(options: object) -> bool:
    """Whether Transformers' code may run the model: also if its configuration can't be read."""
    if not hasattr(options, "model_path"):
        return True
    if getattr(options, "model_impl", "") == "transformers":
        return True
    try:
        names = ModelConfig.from_server_args(options).hf_config.architectures or ()
    except Exception:  # of a hub that does not answer, or of a model's own code
        return True  # a version too many in the name shares less, never too much
    classes = (ModelRegistry.models.get(name) for name in names)
    return any(class_ is None or class_.__module__ == TRANSFORMERS for class_ in classes)
