"""The equations that one update of a small batch gives for every image in it, with or without the position gradient.

With the position gradient they are those of `attacks.closed_form.batch_rounds`. Without it, the conditions of
`attacks.closed_form.token_equations` take their place. Every image of the batch fulfils all of them at every place, so
that no condition reaches the differences of the images: again N (k - 1) directions along which a patch is free, if the
conditions outnumber the others. Their weights differ by many orders of magnitude: a condition counts fully from a
precision of `FULL` on, and below in proportion.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from attacks.closed_form.token_equations import SpanSums, attention_equations, patch_equations, read_block, weigh
from attacks.linear.least_squares import EDGE, RowSolution, solve_rows
from attacks.linear.normal_equations import SETTLED, NormalEquations
from attacks.linear.position_rows import (
    WITHOUT_WEIGHTS,
    missing_positions,
    position_gradient,
    read_position_rows,
    unmet_assumptions,
)
from attacks.linear.views import View
from attacks.observation import Observation
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer, find_tokenizer

# Inverse variance, in normalised pixels, from which on a condition has full weight, and below which it has none.
FULL, LEAST = 1e8, 1e2


@dataclass(frozen=True)
class Step:
    """The equations of each image of one update: (x_p - rows_p) (I - basis^T basis) = 0.

    Attributes:
        rows: (N, P) float64, without what lies along `basis`, and zero where the position row is.
        basis: (n, P) orthonormal; n = N (k - 1), plus the number of rows that are zero, or less where noise hides some.
        sums: the equations, each of weight 1 or less.
        errors: (N,) what the noise of the message leaves of each patch's equations, weighted and squared, by
            expectation.
        num_examples: k, those of all local steps.
        masked: rows of the position gradient that are exactly zero.
        own_masks: the batch hides positions, and not the same ones in all images (or so it may be).
    """

    rows: Tensor
    basis: Tensor
    sums: NormalEquations
    errors: Tensor
    num_examples: int
    masked: int
    own_masks: bool

    def seen_as(self, view: View, tokenizer: Tokenizer) -> Step:
        """The equations of an image of which this step holds a view."""
        errors = torch.where(view.source >= 0, self.errors[view.source], 0.0)
        return replace(self, sums=view.moved(self.sums, tokenizer), errors=errors)

    @property
    def equations(self) -> int:
        """Equations a patch."""
        return self.basis.shape[1] - len(self.basis)


def read_step(observation: Observation) -> Step:
    """The equations of one update, by its position gradient, or without one by the spans of its first attention.

    Raises:
        UsageError: the update does not hold such equations; the message names the condition that fails.
    """
    tokenizer = find_tokenizer(observation.model, observation.image_shape)
    added = tokenizer.positions is not None or tokenizer.fixed_positions is not None
    if added and position_gradient(observation, tokenizer) is None:
        if not observation.weights_granted:
            raise UsageError(f"{missing_positions(observation, tokenizer)}; {WITHOUT_WEIGHTS}")
        if observation.local_steps > 1:
            reason = unmet_assumptions(1, observation.local_steps)[0]
            raise UsageError(f"{missing_positions(observation, tokenizer)}; and {reason}")
        return _read_spans(observation, tokenizer)
    update = read_position_rows(observation)
    tokenizer, visible = update.tokenizer, ~update.masked
    count, masked, patches = images_in(observation), int(update.masked.sum()), len(update.masked)
    spanned = patches * (count - 1) + masked
    facts = describe(observation, masked, patches)
    _check_dimensions(tokenizer, facts, int(visible.sum()), spanned)
    products = update.products[:, : tokenizer.patch_dim]  # (D, P)
    solution = solve_rows(update.rows[visible][None], products[None], hidden=spanned, sent=update.dtype)[0]
    if solution.rank < int(visible.sum()):
        raise UsageError(
            f"{facts}: only {solution.rank} of {int(visible.sum())} directions of the position gradient rise above the "
            "noise of the update, so that too many combinations of patches stay free"
        )
    rows = products.new_zeros(patches, tokenizer.patch_dim)
    rows[visible] = solution.rows
    basis = functional.normalize(solution.unknown, dim=1)  # (n, P)
    sums = NormalEquations(*rows.shape, device=rows.device)
    sums.add(rows, basis)
    shared = tokenizer.shared_embedding(observation.gradients)
    own_masks = count > 1 and shared is not None and bool(shared.any())
    errors = _errors(solution, visible, spanned)
    return Step(rows - (rows @ basis.T) @ basis, basis, sums, errors, count, masked, own_masks)


def _errors(solution: RowSolution, visible: Tensor, spanned: int) -> Tensor:
    """`Step.errors` of rows that were solved, by three parts.

    Noise of the rows themselves, off the basis. Noise that turns the basis, along which the rows are wrong by what
    `RowSolution.gains` says of hidden directions. And hidden directions that sink below the noise, at most `EDGE` of
    its largest singular value each. A row that is zero lies along the basis, with patches of a unit variance a pixel.

    Args:
        visible: (N,) bool, rows that are not zero.
        spanned: directions that the rows that were not sent span.
    """
    (found, dim), spare = solution.unknown.shape, max(solution.spare, 1)
    turned = dim * found / spare
    sunk = max(spanned - found, 0) * (EDGE * (1 + (dim / spare) ** 0.5)) ** 2
    errors = solution.gains.new_zeros(len(visible))
    errors[visible] = solution.gains * (dim - found + turned + sunk)
    if found:
        errors[~visible] = turned * dim / float(solution.unknown.square().sum())
    return errors * solution.noise**2


def images_in(observation: Observation) -> int:
    """k, images in the update, those of all local steps together."""
    return observation.num_examples * observation.local_steps


def describe(observation: Observation, masked: int, num_patches: int) -> str:
    """Size of the batch and mask, in words."""
    count, steps = observation.num_examples, observation.local_steps
    words = f"the batch holds {count} image{'s' * (count > 1)}"
    words += f" and the update sums {steps} local steps" if steps > 1 else ""
    if masked:
        words += (
            f", and {masked} of {num_patches} position rows are exactly zero (patches behind MJP's shared position "
            "embedding)"
        )
    return words


def _check_dimensions(tokenizer: Tokenizer, facts: str, visible: int, spanned: int) -> None:
    """Refuse a step that leaves no equations.

    Raises:
        UsageError: naming the count that must hold.
    """
    outside = tokenizer.width - visible
    if outside < 0 or (spanned and (outside <= spanned or tokenizer.patch_dim <= spanned)):
        raise UsageError(
            f"{facts}: what mixes them spans {spanned} directions a patch, and D - N and P must both exceed that (and "
            f"N must not exceed D), but D - N = {tokenizer.width} - {visible} = {outside} and P = {tokenizer.patch_dim}"
        )


def _read_spans(observation: Observation, tokenizer: Tokenizer) -> Step:
    """The equations of one update without position gradient.

    Raises:
        UsageError: see `token_equations.check_block`; or positions are hidden, or too little is settled.
    """
    count = observation.num_examples
    shared = tokenizer.shared_embedding(observation.gradients)
    if shared is not None and shared.any():
        raise UsageError(
            f"{missing_positions(observation, tokenizer)}; and the shared position embedding has a gradient: which "
            "images of the batch hide which positions cannot be read"
        )
    block = read_block(observation, count)
    attention, patches = attention_equations(block), patch_equations(observation, block)
    weigh(attention, patches)
    conditions = SpanSums.of(*(part for part in (attention, patches) if part is not None))
    values, vectors = torch.linalg.eigh(conditions.matrix)
    weights = torch.where(values > LEAST, values.clamp(max=FULL) / FULL, 0.0)
    settled = values > SETTLED**-2
    if not settled.any():
        raise UsageError("the first attention's gradient settles no direction of a patch: nothing to solve with")
    centre = conditions.targets @ vectors / values.clamp(min=LEAST)  # (N, P)
    sums = NormalEquations(tokenizer.num_patches, tokenizer.patch_dim, values.device)
    targets, squares = (centre * weights) @ vectors.T, centre.square() @ weights
    sums.add_sums((vectors * weights) @ vectors.T, targets, squares, 1.0, int(settled.sum()))
    rows = (centre * settled) @ vectors.T
    errors = (weights / values.clamp(min=LEAST)).sum().expand(tokenizer.num_patches)
    return Step(rows, vectors[:, ~settled].T.contiguous(), sums, errors, count, 0, False)
