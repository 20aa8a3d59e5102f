"""Common parts of the experiments: their requests, their results, and the results' targets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any, ClassVar

from kvtier.serve.engine import Engine, SamplingParams
from kvtier.tools.bench_serve.engines import run_one
from kvtier.tools.bench_serve.options import FULL_PROMPT_TOKENS
from kvtier.tools.report.corpus import Prompt
from kvtier.tools.report.progress import Progress
from kvtier.tools.report.stats import Estimate
from kvtier.tools.report.target import Target

Json = Mapping[str, object]

FEWER = "from fewer runs than the target's"
SHORTER = "with shorter prompts than the target's"


@dataclass(frozen=True)
class ExperimentResult(ABC):
    """Result of one experiment: its rows, and figures that are made from them.

    Attributes:
        name: name of the experiment in the JSON rows.
        full_rows: number of rows for which the targets are defined.
        rows: measurements, in their order.
        prompt_tokens: length of the prompts.
    """

    name: ClassVar[str]
    full_rows: ClassVar[int] = 1
    rows: tuple[Any, ...]
    prompt_tokens: int

    @abstractmethod
    def as_json(self) -> Json:
        """Return the figures."""

    def rows_json(self) -> list[Json]:
        """Return one object per row."""
        return [{"experiment": self.name, **self._row_json(row)} for row in self.rows]

    def _row_json(self, row: Any) -> dict[str, Any]:
        return {
            name: round(value, 3) if isinstance(value, float) else value
            for name, value in asdict(row).items()
        }

    @property
    def full_size(self) -> bool:
        """Whether there are as many runs as the targets require."""
        return len(self.rows) >= self.full_rows

    @property
    def full_length(self) -> bool:
        """Whether the prompts are as long as the targets require."""
        return self.prompt_tokens >= FULL_PROMPT_TOKENS

    @property
    def all_same(self) -> bool:
        """Whether reused KV changed no logits."""
        return True

    def targets(self) -> list[Target]:
        """Return the targets that were measured."""
        return []

    def _target(
        self,
        target_id: str,
        meaning: str,
        found: Estimate,
        wanted: float,
        at_least: bool,
        otherwise: str = "",
    ) -> Target:
        """Return a target. otherwise: a deviation of its own, which makes the figure useless."""
        deviation = FEWER if not self.full_size else otherwise
        if not self.full_length:
            deviation = SHORTER
        is_comparable = self.full_length and not otherwise
        return Target(target_id, meaning, found, wanted, at_least, deviation, is_comparable)


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """ServedRequest to one request.

    ttft_ms: time to first token. hit_tokens: reused tokens by tier. digest: digest of all logits;
    empty if they were not kept.
    """

    ttft_ms: float
    hit_tokens: Mapping[str, int]
    digest: bytes


class RequestRunner:
    """RequestRunner of an experiment, sent one after the other.

    Args:
        progress: shows that a request is done.
        max_tokens: tokens of each answer.
        keep_logits: whether logits are compared.
    """

    def __init__(self, progress: Progress, max_tokens: int, keep_logits: bool = True) -> None:
        self._progress = progress
        self._params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, keep_logits=keep_logits
        )

    def ask(self, engine: Engine, prompt: Prompt, salt: str = "") -> ServedRequest:
        """Serve one request alone."""
        completion = run_one(engine, prompt, self._params, salt)
        ttft_ms = 1000 * completion.ttft_s
        self._progress.advance(f"{ttft_ms:.0f} ms")
        digest = b""
        if completion.logits is not None:
            digest = blake2b(completion.logits.tobytes(), digest_size=16).digest()
        return ServedRequest(ttft_ms, completion.hit_tokens, digest)
