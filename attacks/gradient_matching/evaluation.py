"""The losses of candidates and their derivatives, step after step: computed anew, or on a GPU recorded and replayed.

With small models and batches a step is thousands of short operations, and a GPU waits for the host to start each of
them. A CUDA graph records them once and starts them together: the same operations on the same tensors, so that the
numbers are the same bit for bit.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

WARM_UP = 3  # evaluations before recording, in which libraries set up what a recording must not


@dataclass(frozen=True)
class Candidates:
    """The variables of the optimisation.

    Attributes:
        images: (V, R, B, C, H, W) normalised: victims, restarts, images of the batch.
        labels: (V, R, B, K) logits of the labels if they are optimised too, else None.
    """

    images: Tensor
    labels: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """The images, and the labels if they are optimised."""
        return [self.images] if self.labels is None else [self.images, self.labels]


# (candidates, share of the run that is done, in [0, 1]) -> losses of all searches (V, R).
Objective = Callable[[Candidates, float], Tensor]
# A function -> what computes it again, and the tensors that hold its results each time.
Recorder = Callable[[Callable[[], Sequence[Tensor]]], tuple[Callable[[], None], Sequence[Tensor]]]


class Evaluation:
    """Losses and derivatives at the candidates' current values, computed anew at each call.

    Args:
        objective: the losses.
        candidates: leaf tensors that require gradients; an optimiser changes them in place.
    """

    def __init__(self, objective: Objective, candidates: Candidates) -> None:
        self.objective, self.candidates = objective, candidates
        self._total = torch.empty(0)

    def losses(self, share: float) -> Tensor:
        """(V, R), without a graph, at that share of the run."""
        with torch.enable_grad():
            losses = self.objective(self.candidates, share)
            self._total = losses.sum()
        return losses.detach()

    def gradients(self) -> Sequence[Tensor]:
        """Derivatives of the losses that were computed last, one a tensor of the candidates."""
        return torch.autograd.grad(self._total, self.candidates.tensors())


class Replay(Evaluation):
    """The same, recorded at the first call and after each change of the objective, and replayed in between.

    Args:
        objective: the losses; nothing in it is random or looks at values on the host.
        candidates: see `Evaluation`; they stay in the same memory.
        changes: shares of the run at which the objective changes.
        record: what records; another one is for tests.
    """

    def __init__(
        self, objective: Objective, candidates: Candidates, changes: Sequence[float], record: Recorder | None = None
    ) -> None:
        super().__init__(objective, candidates)
        self._changes, self._record = sorted(changes), record or partial(cuda_graph, candidates.images.device)
        self._phase: int | None = None

    def losses(self, share: float) -> Tensor:
        """See `Evaluation`."""
        phase = bisect_right(self._changes, share)
        if phase != self._phase:
            self._replay, self._held = self._record(lambda: self._both(share))
            self._phase = phase
        self._replay()
        return self._held[0].clone()

    def gradients(self) -> Sequence[Tensor]:
        """See `Evaluation`; valid until the next call of `losses`."""
        return self._held[1:]

    def _both(self, share: float) -> Sequence[Tensor]:
        return (super().losses(share), *super().gradients())


def cuda_graph(
    device: torch.device, function: Callable[[], Sequence[Tensor]]
) -> tuple[Callable[[], None], Sequence[Tensor]]:
    """A `Recorder` by a CUDA graph on `device`. A function that cannot be recorded is computed anew, with a warning."""
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                held = function()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                held = function()
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:120]
            warnings.warn(f"the steps cannot be recorded and take several times longer ({reason})", stacklevel=2)
            return _anew(function, held)
    return graph.replay, held


def _anew(
    function: Callable[[], Sequence[Tensor]], held: Sequence[Tensor]
) -> tuple[Callable[[], None], Sequence[Tensor]]:
    """What `function` gives, copied into the tensors `held` each time."""

    def again() -> None:
        """Compute the function and keep its results."""
        for kept, value in zip(held, function(), strict=True):
            kept.copy_(value)

    return again, held
