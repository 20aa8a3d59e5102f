"""Muon for the matrices inside the layers, AdamW for the embedding and the norms.

Muon: momentum, then the update is replaced by the nearest orthogonal matrix, found by five steps of
a Newton-Schulz iteration. Source: K. Jordan, "Muon: an optimizer for hidden layers" (2024).
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


def orthogonalise(g: Tensor) -> Tensor:
    """Return nearly orthogonal matrices with the directions of g [n, rows, cols], rows <= cols."""
    a, b, c = NEWTON_SCHULZ
    x = g / (g.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon:
    """Momentum with orthogonal updates; matrices of one shape are handled as one batch."""

    def __init__(self, matrices: list[Tensor], momentum: float, weight_decay: float) -> None:
        self._groups: dict[tuple[int, ...], list[tuple[Tensor, bool]]] = {}
        for p in matrices:
            wide = p.shape[0] <= p.shape[1]
            shape = tuple(p.shape if wide else p.mT.shape)
            self._groups.setdefault(shape, []).append((p, wide))
        self._buffers = {s: torch.zeros(len(g), *s) for s, g in self._groups.items()}
        self._momentum = momentum
        self._weight_decay = weight_decay

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Apply the gradients."""
        for shape, group in self._groups.items():
            grads = torch.stack([p.grad if wide else p.grad.mT for p, wide in group])
            buffer = self._buffers[shape]
            buffer.lerp_(grads, 1 - self._momentum)
            update = orthogonalise(grads.lerp(buffer, self._momentum))
            for (p, wide), u in zip(group, update, strict=True):
                u = u if wide else u.mT
                scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                p.mul_(1 - lr * self._weight_decay).add_(u, alpha=-lr * scale)


class Optimiser:
    """Both optimisers behind one ``step``; ``scale`` goes from 0 to 1 and back."""

    MUON_LR = 0.02
    ADAM_LR = 0.004

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self._parameters = list(model.parameters())
        matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
        ids = {id(p) for p in matrices}
        others = [p for p in self._parameters if id(p) not in ids]
        self._muon = Muon(matrices, momentum=0.95, weight_decay=0.05)
        self._adam = torch.optim.AdamW(
            [
                {"params": [p for p in others if p.ndim == 2], "weight_decay": 0.02},
                {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
        )

    def step(self, scale: float) -> None:
        """Clip the gradients, apply and clear them."""
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for group in self._adam.param_groups:
            group["lr"] = self.ADAM_LR * scale
        self._adam.step()
        self._muon.step(self.MUON_LR * scale)
        for p in self._parameters:
            p.grad = None
