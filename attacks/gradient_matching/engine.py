"""The optimisation loop: parallel searches, each of which keeps its best candidate and stops without improvement.

A search is one restart for one victim. Searches are independent: victims are attacked together for speed, and each
search gives the same result as it would alone, up to round-off. When the objective changes during the run (a prior that
becomes active later), losses before and after the change are not comparable, so the best candidate is reset.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.gradient_matching.evaluation import Candidates, Evaluation, Objective, Replay
from attacks.gradient_matching.optimisers import Optimiser

# Called after each step with: steps done, total steps, and the best loss of every search (V, R).
OnStep = Callable[[int, int, Tensor], None]


@dataclass(frozen=True)
class LoopSettings:
    """Settings of the optimisation loop.

    Attributes:
        steps: largest number of steps.
        patience: number of steps without improvement after which a search stops; 0 for never.
        gain: relative decrease of the loss that counts as an improvement.
        seed: of the noise on gradients.
        changes: shares of the run, in [0, 1], at which the objective changes.
        replays: whether a GPU may record a step and replay it; not where the objective draws random numbers.
    """

    steps: int
    patience: int
    gain: float
    seed: int
    changes: tuple[float, ...] = ()
    replays: bool = True


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    Attributes:
        best: candidates of least loss (V, R, ...).
        loss: their losses, (V, R).
        start, last: first and last loss of every search, (V, R).
        limit: (V, R), a larger last loss means divergence: the largest of the first loss and the losses just after each
            change of the objective.
        trace: (steps done, V, R) losses before each step.
        interrupted: whether the user stopped the run.
    """

    best: Candidates
    loss: Tensor
    start: Tensor
    limit: Tensor
    last: Tensor
    trace: Tensor
    interrupted: bool


class _Progress:
    """The best candidate and the latest loss of every search."""

    def __init__(self, candidates: Candidates, losses: Tensor) -> None:
        self.best = [t.detach().clone() for t in candidates.tensors()]
        self.loss = torch.full_like(losses, torch.inf)
        self.start, self.limit, self.last = losses.clone(), losses.clone(), losses.clone()
        self.steps_without_gain = torch.zeros_like(losses, dtype=torch.int64)
        self.active = torch.ones_like(losses, dtype=torch.bool)

    def record(self, candidates: Candidates, losses: Tensor, settings: LoopSettings) -> None:
        """Record the losses (V, R) of the current candidates; stop searches that diverged or no longer improve."""
        self.last = torch.where(self.active, losses, self.last)
        self.active &= losses.isfinite()
        better = self.active & (losses < self.loss)
        counts = better & (losses < self.loss - settings.gain * self.loss.abs().nan_to_num(posinf=0.0))
        self.steps_without_gain = torch.where(counts, 0, self.steps_without_gain + 1)
        self.loss = torch.where(better, losses, self.loss)
        for kept, tensor in zip(self.best, candidates.tensors(), strict=True):
            kept[better] = tensor.detach()[better]
        if settings.patience:
            self.active &= self.steps_without_gain < settings.patience

    def reset_best(self, losses: Tensor) -> None:
        """Discard the best losses after a change of the objective, under which the candidates have `losses` (V, R)."""
        self.limit = torch.maximum(self.limit, losses)
        self.loss = torch.where(self.active, torch.inf, self.loss)
        self.steps_without_gain = torch.zeros_like(self.steps_without_gain)

    def outcome(self, trace: Sequence[Tensor], interrupted: bool) -> Outcome:
        """The result of a run whose losses before each step were `trace`, (V, R) each."""
        losses = torch.stack(list(trace)) if trace else self.start.new_empty(0, *self.start.shape)
        return Outcome(Candidates(*self.best), self.loss, self.start, self.limit, self.last, losses, interrupted)


def minimise(
    objective: Objective,
    start: Candidates,
    optimiser: Optimiser,
    settings: LoopSettings,
    project: Callable[[Tensor], Tensor] | None = None,
    on_step: OnStep | None = None,
) -> Outcome:
    """Minimise the loss of every search.

    Args:
        objective: the losses.
        start: initial candidates (V, R, ...).
        optimiser: updates the candidates.
        settings: number of steps and stopping rules.
        project: maps the images (V, R, B, C, H, W) to allowed ones after each step.
        on_step: called after each step, see `OnStep`.

    Returns:
        The best candidate of every search. An interrupt by the user (KeyboardInterrupt) ends the run early and returns
        the best so far.

    Raises:
        KeyboardInterrupt: the user interrupted before the first loss was computed.
    """
    variables = [t.detach().clone().requires_grad_() for t in start.tensors()]
    candidates = Candidates(*variables)
    if settings.replays and candidates.images.is_cuda:
        evaluation = Replay(objective, candidates, settings.changes)
    else:
        evaluation = Evaluation(objective, candidates)
    torch_optimiser = optimiser.build(variables)
    noise = torch.Generator().manual_seed(settings.seed + 1)
    changes, phase = sorted(settings.changes), 0
    progress: _Progress | None = None
    trace: list[Tensor] = []
    interrupted = False
    try:
        for step in range(settings.steps + 1):
            share = min(step, settings.steps - 1) / settings.steps
            losses = evaluation.losses(share)
            before, phase = phase, bisect_right(changes, share)  # how many changes the losses include
            if progress is not None and phase != before:
                progress.reset_best(losses)
            progress = _Progress(candidates, losses) if progress is None else progress
            progress.record(candidates, losses, settings)
            if step == settings.steps or not progress.active.any():
                break
            trace.append(losses)
            _descend(evaluation.gradients(), losses, variables, torch_optimiser, optimiser, noise, step, settings.steps)
            if project is not None:
                with torch.no_grad():
                    variables[0].copy_(project(variables[0]))
            if on_step is not None:
                on_step(step + 1, settings.steps, progress.loss)
    except KeyboardInterrupt:
        if progress is None:
            raise
        interrupted = True
    return progress.outcome(trace, interrupted)


def _descend(
    gradients: Sequence[Tensor],
    losses: Tensor,
    variables: Sequence[Tensor],
    torch_optimiser: torch.optim.Optimizer,
    optimiser: Optimiser,
    noise: torch.Generator,
    step: int,
    steps: int,
) -> None:
    rate = optimiser.rate * optimiser.schedule(step, steps)
    for group in torch_optimiser.param_groups:
        group["lr"] = rate
    for variable, gradient in zip(variables, gradients, strict=True):
        drawn = None
        if optimiser.uses_noise:  # the same for every victim, so that a result does not depend on the other victims
            drawn = torch.randn(variable.shape[1:], generator=noise).to(variable).expand_as(variable)
        # A search that diverged has NaN gradients, which must not reach the other searches.
        variable.grad = optimiser.transform_gradient(gradient, drawn, rate).nan_to_num()
    torch_optimiser.step(losses.sum)
