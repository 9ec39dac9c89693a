"""From the last hidden states to the loss, a slice of the targets at a time: whole logits can take gigabytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import cross_entropy

SLICE_BYTES = 512 << 20  # of logits in fp32; large enough that the products stay fast

Head = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Targets:
    """What a row must predict.

    Attributes:
        positions: (T,) int64, in the row.
        ids: (T,) int64, the right tokens.
        weights: (T,) float32, of each one's loss.
        losses: (T,) float32, filled with each one's own loss, without its weight; None where nobody asks for it.
    """

    positions: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    losses: torch.Tensor | None = None


def weighted_loss(head: Any, hidden: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Sum of weight * cross-entropy.

    Args:
        head: the frozen output projection, (T, D) -> (T, V).
        hidden: (T, D), at the targets.

    Returns:
        A scalar in fp32.
    """
    rows = max(1, SLICE_BYTES // (4 * int(head.weight.shape[0])))
    if torch.is_grad_enabled() and hidden.requires_grad:
        return _SlicedLoss.apply(hidden, head, targets, rows)  # type: ignore[no-untyped-call]
    return torch.stack([_loss(head, part, own) for part, own in _slices(rows, hidden, targets)]).sum()


class _SlicedLoss(torch.autograd.Function):
    """The gradient is found with the loss, slice by slice, so that nothing as wide as the vocabulary is kept."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, head: Head, targets: Targets, rows: int) -> torch.Tensor:
        # In fp16 small gradients would be lost before the loss scale reaches them; a power of two changes no digits.
        ctx.scale = 1024.0 if hidden.dtype == torch.float16 else 1.0
        total = torch.zeros((), device=hidden.device)
        gradients: list[torch.Tensor] = []
        for part, own in _slices(rows, hidden, targets):
            leaf = part.detach().requires_grad_()
            with torch.enable_grad():
                loss = _loss(head, leaf, replace(own, weights=own.weights * ctx.scale))
            gradients += torch.autograd.grad(loss, leaf)
            total += loss.detach() / ctx.scale
        ctx.save_for_backward(torch.cat(gradients))
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradients,) = ctx.saved_tensors
        return (gradients * (gradient / ctx.scale)).to(gradients.dtype), None, None, None


def _slices(rows: int, hidden: torch.Tensor, targets: Targets) -> Iterator[tuple[torch.Tensor, Targets]]:
    for start in range(0, len(hidden), rows):
        place = slice(start, start + rows)
        losses = targets.losses[place] if targets.losses is not None else None
        yield (
            hidden[place],
            Targets(targets.positions[place], targets.ids[place], targets.weights[place], losses),
        )


def _loss(head: Head, hidden: torch.Tensor, targets: Targets) -> torch.Tensor:
    losses = cross_entropy(head(hidden).float(), targets.ids, reduction="none")
    if targets.losses is not None:
        targets.losses.copy_(losses.detach())
    return (losses * targets.weights).sum()
