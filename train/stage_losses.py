"""The loss of each stage of staged answers, by its name; summed on the device, read when a line is logged."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from train.pack import Pack


class StageLosses:
    """Weighted mean cross-entropy of each stage over some packs.

    Args:
        names: of the stages; none for data without them, which then costs nothing.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._names = tuple(names)
        self._totals = torch.zeros(2, len(self._names), device=device, dtype=torch.float64)

    def room(self, pack: Pack) -> torch.Tensor | None:
        """(T,) float32, for pack_loss to fill; None where nothing is asked of this pack."""
        if pack.stage_weights is None:
            return None
        return torch.empty_like(pack.target_weights)

    def add(self, pack: Pack, losses: torch.Tensor | None) -> None:
        """Count a pack, without waiting for the device.

        Args:
            losses: as `room` gave it, filled.
        """
        if pack.stage_weights is not None and losses is not None:
            self._totals[0] += (pack.stage_weights * losses).sum(1)
            self._totals[1] += pack.stage_weights.sum(1)

    def take(self, reduce: Callable[[torch.Tensor], torch.Tensor] = lambda totals: totals) -> dict[str, float]:
        """`loss_<stage>` -> mean since the last call; a stage without a target is left out. Waits for the device.

        Args:
            reduce: sums over processes; every process must call this then.
        """
        if not self._names:
            return {}
        sums, weights = reduce(self._totals).tolist()
        self._totals = torch.zeros_like(self._totals)
        return {
            f"loss_{name}": total / weight
            for name, total, weight in zip(self._names, sums, weights, strict=True)
            if weight
        }
