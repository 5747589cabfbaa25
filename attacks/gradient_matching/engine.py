"""The loop: candidates go downhill, every lane remembers its best, lanes that stand still stop.

Lanes are independent: victims are attacked together for speed, and each ends as it would alone but for round-off. An
objective that changes on the way (a prior that begins later) makes values before and after incomparable, so the best is
sought anew from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.gradient_matching.optimisers import Optimiser

# Losses of all lanes (V, R) at candidates and the share of the run that is over.
Objective = Callable[["Candidates", float], Tensor]
# Told after each step: steps done, steps asked for, and the best loss of every lane (V, R).
OnStep = Callable[[int, int, Tensor], None]


@dataclass(frozen=True)
class Candidates:
    """What is sought.

    Attributes:
        images: (V, R, B, C, H, W) normalised: victims, restarts, images of the batch.
        labels: (V, R, B, K) logits of the labels where they are sought too, else None.
    """

    images: Tensor
    labels: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Those that are there."""
        return [self.images] if self.labels is None else [self.images, self.labels]


@dataclass(frozen=True)
class Rules:
    """When a run ends.

    Attributes:
        steps: at most so many.
        patience: steps without gain after which a lane stops; 0 for never.
        gain: relative fall of the loss that counts as one.
        seed: of the noise on gradients.
        changes: shares of the run at which the objective changes.
    """

    steps: int
    patience: int
    gain: float
    seed: int
    changes: tuple[float, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """Where the run ended.

    Attributes:
        best: candidates of least loss (V, R, ...).
        loss: theirs, (V, R).
        start, last: first and last loss of every lane, (V, R).
        limit: what the last loss should not exceed: the first, or where the objective changed, the one after if larger.
        trace: (steps done, V, R) losses before each step.
        interrupted: the user stopped it.
    """

    best: Candidates
    loss: Tensor
    start: Tensor
    limit: Tensor
    last: Tensor
    trace: Tensor
    interrupted: bool


class _Memory:
    """Best and latest of every lane."""

    def __init__(self, candidates: Candidates, losses: Tensor) -> None:
        self.best = [t.detach().clone() for t in candidates.tensors()]
        self.loss = torch.full_like(losses, torch.inf)
        self.start, self.limit, self.last = losses.clone(), losses.clone(), losses.clone()
        self.idle = torch.zeros_like(losses, dtype=torch.int64)
        self.open = torch.ones_like(losses, dtype=torch.bool)

    def note(self, candidates: Candidates, losses: Tensor, rules: Rules) -> None:
        """Take in the losses (V, R) of the candidates as they stand; close lanes that diverged or stand still."""
        self.last = torch.where(self.open, losses, self.last)
        self.open &= losses.isfinite()
        better = self.open & (losses < self.loss)
        counts = better & (losses < self.loss - rules.gain * self.loss.abs().nan_to_num(posinf=0.0))
        self.idle = torch.where(counts, 0, self.idle + 1)
        self.loss = torch.where(better, losses, self.loss)
        for kept, tensor in zip(self.best, candidates.tensors(), strict=True):
            kept[better] = tensor.detach()[better]
        if rules.patience:
            self.open &= self.idle < rules.patience

    def forget(self, losses: Tensor) -> None:
        """The objective has changed, and gives these losses (V, R): what was best says nothing of the new one."""
        self.limit = torch.maximum(self.limit, losses)
        self.loss = torch.where(self.open, torch.inf, self.loss)
        self.idle = torch.zeros_like(self.idle)


def minimise(
    objective: Objective,
    start: Candidates,
    optimiser: Optimiser,
    rules: Rules,
    project: Callable[[Tensor], Tensor] | None = None,
    on_step: OnStep | None = None,
) -> Outcome:
    """Minimise every lane's loss.

    Args:
        project: brings images back to what is allowed, after each step.
        on_step: told of progress.

    Returns:
        The best of every lane; an interrupt (KeyboardInterrupt) ends the run early and keeps it.
    """
    variables = [t.detach().clone().requires_grad_() for t in start.tensors()]
    candidates = Candidates(*variables)
    torch_optimiser = optimiser.make(variables)
    noise = torch.Generator().manual_seed(rules.seed + 1)
    changes = {round(share * rules.steps) for share in rules.changes} - {0}
    memory: _Memory | None = None
    trace: list[Tensor] = []
    interrupted = False
    try:
        for step in range(rules.steps + 1):
            share = min(step, rules.steps - 1) / rules.steps
            with torch.enable_grad():
                losses = objective(candidates, share)
                total = losses.sum()
            if memory is not None and step in changes:
                memory.forget(losses.detach())
            memory = _Memory(candidates, losses.detach()) if memory is None else memory
            memory.note(candidates, losses.detach(), rules)
            if step == rules.steps or not memory.open.any():
                break
            trace.append(losses.detach())
            _descend(total, variables, torch_optimiser, optimiser, noise, step, rules.steps)
            if project is not None:
                with torch.no_grad():
                    variables[0].copy_(project(variables[0]))
            if on_step is not None:
                on_step(step + 1, rules.steps, memory.loss)
    except KeyboardInterrupt:
        if memory is None:
            raise
        interrupted = True
    empty = memory.start.new_empty(0, *memory.start.shape)
    return Outcome(
        Candidates(*memory.best),
        memory.loss,
        memory.start,
        memory.limit,
        memory.last,
        torch.stack(trace) if trace else empty,
        interrupted,
    )


def _descend(
    total: Tensor,
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
    gradients = torch.autograd.grad(total, variables)
    for variable, gradient in zip(variables, gradients, strict=True):
        drawn = None
        if optimiser.noisy:  # the same for every victim, so that company does not matter
            drawn = torch.randn(variable.shape[1:], generator=noise).to(variable).expand_as(variable)
        # A lane that diverged stands still and must not spoil its neighbours.
        variable.grad = optimiser.direct(gradient, drawn, rate).nan_to_num()
    torch_optimiser.step(total.detach)
