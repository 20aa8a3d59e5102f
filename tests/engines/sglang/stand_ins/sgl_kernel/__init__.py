"""Stand-in for ``sgl_kernel``, whose CPU build is in no registry.

It has the one function that SGLang calls on a CPU without speculative decoding. SGLang has
fallbacks for the native functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    row_length: int,
) -> None:
    """Write where each request's tokens are.

    Row ``requests[i]`` of ``table`` from ``starts[i]`` to ``ends[i]`` gets the next of ``slots``.
    """
    del row_length
    done = 0
    for request, start, end in zip(requests, starts, ends, strict=True):
        num = int(end - start)
        table[request, start:end] = slots[done : done + num].to(table.dtype)
        done += num


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in for a CPU")

    return missing
