"""The loss in slices against the loss of the whole logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from train import head as module
from train.head import Targets, weighted_loss


@pytest.fixture
def case() -> tuple[torch.nn.Linear, torch.Tensor, Targets]:
    """37 targets over a vocabulary of 101."""
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 101, bias=False).requires_grad_(False)
    hidden = torch.randn(37, 16)
    weights = torch.rand(37)
    weights[3] = 0
    return head, hidden, Targets(torch.arange(37), torch.randint(0, 101, (37,)), weights)


@pytest.fixture(params=[1, 5, 37, 1000])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many targets a slice holds."""
    monkeypatch.setattr(module, "SLICE_BYTES", request.param * 4 * 101)
    return int(request.param)


Case = tuple[torch.nn.Linear, torch.Tensor, Targets]


def _whole(head: torch.nn.Linear, hidden: torch.Tensor, targets: Targets) -> torch.Tensor:
    return (cross_entropy(head(hidden).float(), targets.ids, reduction="none") * targets.weights).sum()


def test_loss_and_gradient_are_those_of_the_whole(rows: int, case: Case) -> None:
    head, hidden, targets = case
    results = []
    for how in (_whole, weighted_loss):
        leaf = hidden.clone().requires_grad_()
        loss = how(head, leaf, targets) * 3.0
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    (right, right_gradient), (loss, gradient) = results

    torch.testing.assert_close(loss, right, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, right_gradient, rtol=1e-5, atol=1e-8)


def test_without_gradients_the_loss_is_the_same(rows: int, case: Case) -> None:
    head, hidden, targets = case
    with torch.no_grad():
        torch.testing.assert_close(
            weighted_loss(head, hidden.clone().requires_grad_(), targets), _whole(head, hidden, targets)
        )


def test_no_logits_are_kept_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    head, hidden, targets = case
    monkeypatch.setattr(module, "SLICE_BYTES", 5 * 4 * 101)
    loss = weighted_loss(head, hidden.clone().requires_grad_(), targets)

    assert loss.grad_fn is not None
    assert [tensor.shape for tensor in loss.grad_fn.saved_tensors] == [hidden.shape]  # type: ignore[attr-defined]


def test_small_gradients_survive_in_half_precision(case: Case) -> None:
    head, hidden, targets = case
    half = torch.nn.Linear(16, 101, bias=False, dtype=torch.float16).requires_grad_(False)
    half.weight.data = head.weight.data.half()
    tiny = Targets(targets.positions, targets.ids, targets.weights * 2.0**-22)
    leaf = hidden.half().requires_grad_()
    loss_scale = 2.0**16  # as a gradient scaler multiplies the loss

    (weighted_loss(half, leaf, tiny) * loss_scale).backward()

    exact = hidden.clone().requires_grad_()
    (_whole(head, exact, tiny) * loss_scale).backward()
    assert leaf.grad is not None
    assert exact.grad is not None
    assert float((leaf.grad.float() - exact.grad).norm() / exact.grad.norm()) < 0.02
