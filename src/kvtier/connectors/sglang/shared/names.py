"""Names of SGLang's pages outside the process."""

from __future__ import annotations

import sglang

from kvtier.connectors.common.names import BlockNames
from kvtier.connectors.sglang.shared.engine_code import engine_code
from kvtier.connectors.sglang.shared.identity import StorageConfig, engine_digest, sources
from kvtier.identity import UnknownCodeError


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

    def settle_engine(self, config: StorageConfig) -> None:
        """Identify the weights and the code that KV is computed with."""
        try:
            self._code = engine_code(self._options)
        except UnknownCodeError as error:
            self.disown(str(error))
        else:
            self.settle(sources(self._options, config))
