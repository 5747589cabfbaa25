"""Gauss-Newton on the spans of the whole first block, where its attention's spans leave patches open.

The inputs of the first block's MLP fulfil the conditions of `attacks.linear.input_spans` as those of its attention do,
but they depend on the attention of all tokens (its output is added before the MLP) and, for the second layer, pass the
activation. So they are conditions on all patches jointly and no longer linear:

    minimise over X:  sum over layers l, tokens j of  |w_lj V_l [input_lj(X), 1]|^2  +  (the linear conditions on X),

V_l the conditions of layer l. The inputs are those of the sent model's own forward pass, stopped at the last layer
needed, so that any implementation of a pre-norm block will do. Steps are solved by conjugate gradients; products with
the Jacobian and its transpose come from automatic differentiation, and the preconditioner is the part of the Hessian
that every patch has alone if attention is held fixed, the same matrix for all patches, with the attention's own
conditions at their full weight: it keeps the search within what they leave open.

A token's weight w_lj is the inverse of the standard error that `InputSpan.error` gives for its conditions; at the first
step the errors that the uncertainty of X causes are added, from one draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from attacks.linear.image_prior import conjugate_gradients
from attacks.linear.input_spans import InputSpan
from attacks.tokenizer import Tokenizer

# Conjugate gradients stop at this relative size of the preconditioned residual.
TOLERANCE = 1e-4
# Steps are shortened by this factor, so often at most, until the misfit falls.
SHORTER, TRIALS = 1 / 3, 5
# Least variance of a condition, so that float64 keeps what the weights leave.
LEAST_ERROR = 1e-11
# A step below this, in normalised pixels, ends the iteration.
SMALL_STEP = 1e-4


class _Reached(Exception):
    """The forward pass has come to the last layer that is needed."""


@dataclass(frozen=True)
class Front:
    """The sent model up to some layers of its first block, in float64.

    Args:
        model: as sent; it is not changed.
        tokenizer: of the model.
        layers: names of the layers' weights, in the order of the forward pass.
    """

    model: nn.Module
    tokenizer: Tokenizer
    layers: tuple[str, ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.model.named_parameters()]
        needed = names[: max(map(names.index, self.layers)) + 1]
        parameters = dict(self.model.named_parameters())
        tensors = {n: parameters[n].detach() for n in needed} | dict(self.model.named_buffers())
        double = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
        object.__setattr__(self, "_tensors", double)

    def inputs(self, patches: Tensor) -> list[Tensor]:
        """What each layer reads of one image's tokens, (N', inputs), for patches (N, P) normalised."""
        found: dict[str, Tensor] = {}
        handles = []
        try:
            for name in self.layers:
                layer = self.model.get_submodule(name.rpartition(".")[0])
                handles.append(layer.register_forward_pre_hook(_Recorder(found, name, last=name == self.layers[-1])))
            functional_call(self.model, self._tensors, (self.tokenizer.unpatchify(patches[None]),))
        except _Reached:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return [found[name].reshape(-1, found[name].shape[-1]) for name in self.layers]


@dataclass(frozen=True)
class _Recorder:
    """A hook that keeps a layer's input and, at the last layer, ends the forward pass."""

    found: dict[str, Tensor]
    name: str
    last: bool

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """See `torch.nn.Module.register_forward_pre_hook`."""
        self.found[self.name] = inputs[0]
        if self.last:
            raise _Reached


@dataclass(frozen=True)
class Refined:
    """Patches after some steps.

    Attributes:
        patches: (N, P) normalised.
        deviation: (N,) rms error of a normalised pixel that is to be expected: that of the conditions with attention
            held fixed, or the last step where that is longer.
        steps: Gauss-Newton steps taken.
    """

    patches: Tensor
    deviation: Tensor
    steps: int


@dataclass(frozen=True)
class Refinement:
    """The conditions of one update's first block.

    Attributes:
        front: of the sent model.
        spans: of each layer of `front`.
        own: derivative of the second layer's input with respect to a patch with attention held fixed, (c - 1, P), for
            the preconditioner; None where it is not known.
        hessian: (P, P) of one patch by the conditions of attention and projection.
        linear: H (P, P) and r (N, P) of the linear conditions on the patches.
    """

    front: Front
    spans: Sequence[InputSpan]
    own: Tensor | None
    hessian: Tensor
    linear: tuple[Tensor, Tensor]

    def run(self, start: Tensor, spread: Tensor, steps: int, iterations: int) -> Refined:
        """Gauss-Newton from `start`.

        Args:
            start: (N, P) normalised patches.
            spread: a square root R of the covariance R R^T of a patch of `start`, (P, k).
            steps: of Gauss-Newton, at most.
            iterations: of conjugate gradients a step.
        """
        draw = torch.randn(start.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        moved = start + draw.to(start)[:, : spread.shape[1]] @ spread.T
        with sdpa_kernel(SDPBackend.MATH):
            patches, last, taken = start, torch.full_like(start[:, 0], torch.inf), 0
            weights = self._weights(start, moved)
            for _ in range(steps):
                step = self._step(patches, weights, iterations)
                if step is None:
                    break
                patches, taken = patches + step, taken + 1
                weights = self._weights(patches)
                last = step.square().mean(dim=1).sqrt()
                if float(last.square().mean().sqrt()) < SMALL_STEP:
                    break
        variance = torch.linalg.inv(self._own_hessian(weights)).diagonal().mean()
        return Refined(patches, torch.maximum(variance.sqrt(), last), taken)

    def _extended(self, patches: Tensor) -> list[Tensor]:
        """[input_lj, 1] of each layer's tokens, (N', c); without the 1 where the layer's bias was not sent."""
        return [
            functional.pad(inputs, (0, span.directions.shape[1] - inputs.shape[1]), value=1.0)
            for inputs, span in zip(self.front.inputs(patches), self.spans, strict=True)
        ]

    def _misfit(self, patches: Tensor, weights: Sequence[Tensor]) -> float:
        """What the steps minimise, but for a constant."""
        (h, r), parts = self.linear, zip(weights, self._extended(patches), self.spans, strict=True)
        outside = sum((w * span.outside(inputs)).square().sum() for w, inputs, span in parts)
        return float(outside + ((patches @ h - 2 * r) * patches).sum())

    def _weights(self, patches: Tensor, moved: Tensor | None = None) -> list[Tensor]:
        """w_lj, (N', 1) for each layer; with the difference that `moved` patches make added to the error."""
        inputs, found = self._extended(patches), []
        others = inputs if moved is None else self._extended(moved)
        for here, there, span in zip(inputs, others, self.spans, strict=True):
            error = span.error((here @ span.directions.T).square())
            left, moved_by = (span.outside(x).square().sum(dim=1) / len(span.conditions) for x in (here, there - here))
            error = error + (left + left.mean()) / 2 + moved_by
            found.append(error.clamp(min=LEAST_ERROR).rsqrt()[:, None])
        return found

    def _own_hessian(self, weights: Sequence[Tensor]) -> Tensor:
        """(P, P): the Hessian of one patch with attention held fixed, for weights averaged over tokens."""
        if self.own is None:
            return self.hessian
        part = self.spans[1].conditions[:, : len(self.own)] @ self.own
        return self.hessian + float(weights[1].square().mean()) * part.T @ part

    def _step(self, patches: Tensor, weights: Sequence[Tensor], iterations: int) -> Tensor | None:
        """One step that lowers the misfit; None where none does."""
        h, r = self.linear
        widths = [span.directions.shape[1] for span in self.spans]
        with torch.enable_grad():
            x = patches.clone().requires_grad_()
            inputs = torch.cat(self._extended(x), dim=1)  # (N', sum of the widths)
            dual = torch.zeros_like(inputs).requires_grad_()
            (pulled,) = torch.autograd.grad(inputs, x, dual, create_graph=True)  # J^T dual, linear in dual

        def push(v: Tensor) -> Tensor:
            """J v, the derivative of J^T dual with respect to dual."""
            return torch.autograd.grad(pulled, dual, v, retain_graph=True)[0]

        def pull(u: Tensor) -> Tensor:
            """J^T W u, with W the layers' conditions in their weights, (w V)^T w V."""
            parts = zip(weights, u.split(widths, dim=1), self.spans, strict=True)
            weighed = torch.cat([w.square() * span.outside(part) for w, part, span in parts], dim=1)
            return torch.autograd.grad(inputs, x, weighed, retain_graph=True)[0]

        inverse = torch.linalg.inv(self._own_hessian(weights))
        target = r - patches @ h - pull(inputs.detach())
        step = conjugate_gradients(
            lambda v: pull(push(v)) + v @ h,
            target,
            torch.zeros_like(target),
            lambda v: v @ inverse,
            iterations,
            TOLERANCE,
        )
        before = self._misfit(patches, weights)
        for trial in range(TRIALS):
            shorter = step * SHORTER**trial
            if self._misfit(patches + shorter, weights) < before:
                return shorter.detach()
        return None
