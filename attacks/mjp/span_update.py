"""The equations of one update with masked positions whose position gradient is withheld.

The first attention's gradient and the patch projection's put conditions on the patch at every place
(`attacks.closed_form.token_equations`), if the embedding that its token holds is known: a visible patch holds the one
that was sent for its place, a masked one the shared one, which was sent as well.

*Mask.* At a visible place some patch in the projection's span fulfils the conditions with the place's own embedding, at
a masked one none does: what they miss by is noise in the first case, and in the second what a wrong embedding leaves,
orders of magnitude more and alike at all masked places. With the shared embedding they are fulfilled if, and only if,
any place is masked.

*Dropped patches* (`Observation.drops_patches`) are in no equation, and masked places may be theirs. Fewer tokens put
conditions on more places, and a place may fulfil them that was not shown: where the embedding is the sum of a row's and
a column's, as fixed sines and cosines are, the fourth corner of a rectangle of shown places does, with the patch x_a +
x_b - x_c. Shown places whose embedding and patch together are an affine combination of others' are therefore not used.

*Masked patches* fulfil the conditions with the shared embedding, all of them and at all places: this says that they lie
in one affine space. Its directions are differences of masked patches, along which no condition reaches any patch
either, just as where the position gradient is sent (`attacks.linear.masked_update`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.closed_form.token_equations import (
    Block,
    SpanSums,
    attention_equations,
    patch_equations,
    read_block,
    weigh,
)
from attacks.linear.masked_update import MaskedUpdate
from attacks.linear.normal_equations import NEGLIGIBLE, SETTLED, NormalEquations
from attacks.linear.position_rows import projection_products, unmet_assumptions
from attacks.observation import Observation
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer

# Least factor between what masked and visible places miss by, and largest one among masked places.
APART, ALIKE = 10.0, 100.0
# The same among places that an encoder without some of the patches does not show: their embeddings differ more.
ALIKE_DROPPED = 1e4
# Share of a place's embedding and patch that other shown places leave unexplained, below which it may be made of them.
EXPLAINED = 1e-3
AMBIGUOUS = (
    "the places that the first attention's gradient shows are all sums of one another: an embedding that is the sum of "
    "a row's and a column's puts the fourth corner of every rectangle into the span of the other three"
)


@dataclass(frozen=True)
class SpanUpdate:
    """One update without position gradient.

    Attributes:
        tokenizer: of the observed model.
        masked: (N,) bool, places whose token does not hold their own embedding.
        products: [dL/dE, dL/db], (D, P + 1) float64.
        seen: patches that the model saw.
        solved: the equations.
        noisy: the first attention's gradient holds more than its tokens and round-off.
    """

    tokenizer: Tokenizer
    masked: Tensor
    products: Tensor
    seen: int
    solved: MaskedUpdate
    noisy: bool


def read_span_update(observation: Observation) -> SpanUpdate:
    """Mask and equations of one update.

    Raises:
        UsageError: the model adds no position embedding, the update lacks the first attention's or the projection's
            gradient, or there are too many tokens for the channels.
    """
    products = projection_products(observation, read_block(observation).tokenizer)
    block = read_block(observation)
    tokenizer, reasons = block.tokenizer, unmet_assumptions(observation.num_examples, observation.local_steps)
    shared = tokenizer.shared_embedding(dict(observation.model.named_parameters()))
    masked, offsets = torch.zeros(tokenizer.num_patches, dtype=torch.bool, device=products.device), block.offsets
    if shared is not None:
        bias = block.weights[tokenizer.bias] if tokenizer.bias else 0.0
        hidden = shared.detach().double() + bias
        masked, clear = find_mask(observation, block, hidden)
        if not clear:
            reasons.append(
                "the first attention's gradient does not tell masked places from visible ones (too much noise, or too "
                "few channels for the tokens)"
            )
        offsets = torch.where(masked[:, None], hidden, offsets)
    attention, patches = attention_equations(block, offsets), patch_equations(observation, block)
    weigh(attention, patches)
    sums = SpanSums.of(attention, patches)
    values, vectors = torch.linalg.eigh(sums.matrix)
    open_ = values < SETTLED**-2
    if int(open_.sum()) >= tokenizer.patch_dim - 1 or bool(masked.all()):
        raise UsageError("the first attention's gradient settles no direction of a patch: nothing to solve with")
    equations = NormalEquations(tokenizer.num_patches, tokenizer.patch_dim, products.device)
    largest, settled = float(values[-1]), int((~open_).sum())
    equations.add_sums(sums.matrix, sums.targets, sums.squares, largest, settled)
    solid = values.clamp(min=max(1.0, NEGLIGIBLE * largest))  # a pixel's variance is 1
    rows, basis = (sums.targets @ vectors / solid) @ vectors.T, vectors[:, open_].T.contiguous()
    if observation.drops_patches:
        masked = masked | ambiguous_places(block.offsets, rows - (rows @ basis.T) @ basis, ~masked)
        if masked.all():
            raise UsageError(AMBIGUOUS)
    solved = MaskedUpdate(
        rows=rows,
        basis=basis,
        scale=torch.ones_like(sums.squares),
        sizes=solid[open_].rsqrt(),
        tilt=torch.zeros_like(values[open_]),
        masked=masked,
        noise=float(solid[~open_].reciprocal().mean().sqrt()),
        deviation=torch.zeros_like(sums.squares),
        rank=int(open_.sum()),
        condition=float((values[-1] / values[~open_][0]).sqrt()),
        dal_weight=0.0,
        reasons=tuple(reasons),
        sums=equations,
        dropped=observation.drops_patches,
    )
    return SpanUpdate(tokenizer, masked, products, block.patches, solved, block.span.added)


def find_mask(observation: Observation, block: Block, hidden: Tensor) -> tuple[Tensor, bool]:
    """(N,) bool, masked places, and whether they stand apart from the visible ones.

    Args:
        hidden: (D,), bias and the embedding that masked places share.
    """
    patches = patch_equations(observation, block)
    own, shared = (
        SpanSums.of(attention_equations(block, offsets), patches).least()
        for offsets in (block.offsets, hidden.expand_as(block.offsets))
    )
    ordered, fitting = own.sort().values, float(shared.min())
    if fitting > APART * ordered[-1]:
        return torch.zeros_like(own, dtype=torch.bool), True
    factors = ordered[1:] / ordered[:-1].clamp(min=torch.finfo(own.dtype).tiny)
    alike = ALIKE_DROPPED if observation.drops_patches else ALIKE
    factors = torch.where(ordered[1:] * alike > ordered[-1], factors, 0.0)
    last = int(factors.argmax())  # of the visible places
    return own > ordered[last], bool(factors[last] > APART) and fitting < ordered[last + 1] / APART


def ambiguous_places(offsets: Tensor, rows: Tensor, shown: Tensor) -> Tensor:
    """(N,) bool, places whose embedding and patch are an affine combination of other shown places'.

    Args:
        offsets: (N, D) bias and embedding at each place.
        rows: (N, P) normalised patches, without the directions that stay open.
        shown: (N,) bool, places that fulfil the conditions.
    """
    whole = torch.cat([offsets, rows, torch.ones_like(rows[:, :1])], dim=1)[shown]
    whole = whole / whole.norm(dim=1, keepdim=True)
    found = torch.zeros_like(shown)
    _, sizes, right = torch.linalg.svd(whole.T, full_matrices=True)  # (V, V): combinations of the places
    null = right[int((sizes > EXPLAINED).sum()) :]
    found[shown] = (null.square().sum(dim=0) > EXPLAINED**2) if len(null) else False
    return found
