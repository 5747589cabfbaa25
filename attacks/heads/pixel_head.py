"""Inversion of a batch of views whose update restores pixels by a linear head under an L1 loss (MST).

One message of a step on k views (two crops of an image under MST) is solved in four steps.

1. The head alone: features of all k N tokens, their outputs, and for every pixel of every view, masked ones included,
   whether it is above its output (`attacks.heads.sign_tokens`).
2. Position rows and projection: at each place the views' patches are rows_p + c B, with B (N (k - 1), P) known
   (`attacks.closed_form.batch_rounds`). So a token's bits say where it lies, and c roughly (`attacks.heads.one_bit`).
   A place that some view masks has rows_p = 0, because the replaced patch is in no equation.
3. Tokens are laid out in views (`attacks.heads.arrangement`).
4. The patches are searched whose tokens are those that were read (`attacks.heads.inversion`), computed forward through
   encoder and decoder. A masked place has the token that the model keeps for it (`mask_token`).

Masked patches are in no gradient but the head's signs: they are returned as the likeliest patch with these signs, given
the spread of the others, and never vouched for.

It departs from `attacks.heads.position_head` in what is known of the head's rows, and shares its search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from attacks.closed_form.batch_step import Step, read_step
from attacks.heads.arrangement import Arrangement, arrange, first_places, improved
from attacks.heads.base import HeadAttack
from attacks.heads.encoder import Decoder, Encoder
from attacks.heads.inversion import HeadSearch
from attacks.heads.one_bit import OneBitFit, chance, fit_signs, likeliest
from attacks.heads.sign_tokens import SignTokens, read_sign_tokens
from attacks.linear.dense_head import VALUES, DenseHead, Rows
from attacks.mjp.token_patches import KnownPatches
from attacks.observation import Capability, Observation, Reconstruction
from attacks.tokenizer import Tokenizer, find_tokenizer

# A place's rows below this share of the largest place's are those of a place that a view masks.
MASKED = 1e-3
# Share of the head's gradient unexplained, and of a token's features missed, above which nothing is vouched for.
LARGEST_RESIDUAL, LARGEST_MISS = 1e-6, 5e-3
# Name of the token that stands for masked patches (BEiT, SimMIM, MST).
MASK_TOKEN = "mask_token"


@dataclass(frozen=True, kw_only=True)
class PixelHead(HeadAttack):
    """Read a head of pixels under an L1 loss, then search the views whose tokens it has.

    Args:
        steps: evaluations of the tokens, at most (those of line searches not counted).
    """

    steps: int = 400

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MODEL_WEIGHTS, Capability.POSITION_GRADIENT})
    rows: ClassVar[Rows] = VALUES
    seconds_of_reading: ClassVar[float] = 5.0  # and of laying out the tokens

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; the views in any order.

        `details` holds the evaluations, the vectors of signs found, the number of masked patches, the relative residual
        of the head's gradient (head_residual), and the largest share of a token's features that is missed (miss).
        """
        target = observations[-1]
        tokenizer = find_tokenizer(target.model, target.image_shape)
        head = VALUES.find(target, tokenizer)
        read, step = read_sign_tokens(head), read_step(target)
        views = Views(target, tokenizer, head, read, step)
        arrangement = views.arranged()
        search = views.search(arrangement)
        search.run(self.steps)
        return views.answer(arrangement, search)


class Views:
    """The views of one update.

    Args:
        target: the update.
        tokenizer: of its model.
        head: of pixels.
        read: its tokens.
        step: the equations of every view's patches.
    """

    def __init__(
        self, target: Observation, tokenizer: Tokenizer, head: DenseHead, read: SignTokens, step: Step
    ) -> None:
        self.target, self.tokenizer, self.head, self.read, self.step = target, tokenizer, head, read, step
        self.fit: OneBitFit = fit_signs(read.signs, read.outputs, step.rows, step.basis)
        sizes = step.rows.norm(dim=1)
        self.masked = sizes < MASKED * sizes.max()  # (N,)
        self.decoder = Decoder(Encoder(target.model, tokenizer, head.name))
        self.places = torch.arange(target.num_examples * len(sizes), device=sizes.device) % len(sizes)  # (k N,)
        self.replaced = _replaced_patch(target.model, tokenizer)

    def arranged(self) -> Arrangement:
        """The tokens in their places and views."""
        tokenizer, surprise = self.tokenizer, self.fit.surprise
        at = first_places(surprise, self.target.num_examples)
        patches = self.step.rows[at] + self.fit.coefficients[range(len(at)), at] @ self.step.basis  # (k N, P)
        pixels = self.target.to_pixels(patches.view(len(at), tokenizer.channels, *[tokenizer.patch_size] * 2))
        arrangement = arrange(tokenizer.grid, surprise, pixels, self.masked, chance(tokenizer.patch_dim))
        return improved(arrangement, surprise, self.masked, self.difference)

    def known(self, arrangement: Arrangement) -> KnownPatches:
        """What is known of the patches at each place of each view; masked ones as the model replaces them."""
        rows, hidden = self.step.rows[self.places].clone(), arrangement.hidden
        rows[hidden] = self.replaced
        return KnownPatches(rows, self.step.basis, hidden, torch.zeros_like(hidden))

    def coefficients(self, arrangement: Arrangement) -> Tensor:
        """(k N, r), as the signs leave them; none where a place is masked."""
        found = self.fit.coefficients[arrangement.tokens, self.places]
        return torch.where(arrangement.hidden[:, None], 0.0, found)

    def difference(self, arrangement: Arrangement) -> float:
        """Squared, of the tokens under an arrangement from those read."""
        known = self.known(arrangement)
        tokens = self.decoder(known.rows + self.coefficients(arrangement) @ known.basis)
        return float((tokens - self.read.features[arrangement.tokens]).square().sum())

    def search(self, arrangement: Arrangement) -> HeadSearch:
        """For the patches, from what the signs say of them."""
        slopes = self.read.scale * self.read.signs[arrangement.tokens]  # (k N, K), c S
        hidden = arrangement.hidden[:, None]

        def tokens(patches: Tensor, key_bias: Tensor | None = None) -> Tensor:
            """Those that the head reads, with masked patches replaced."""
            return self.decoder(torch.where(hidden, self.replaced, patches), key_bias)

        start = self.coefficients(arrangement)
        return HeadSearch(self.head, lambda _: slopes, tokens, self.known(arrangement), None, start)

    def answer(self, arrangement: Arrangement, search: HeadSearch) -> Reconstruction:
        """What was found of every view."""
        hidden, patches = arrangement.hidden, search.patches.clone()
        own = self.read.features[arrangement.tokens]
        misses = (search.tokens() - own).norm(dim=1) / own.norm(dim=1).mean()
        signs, outputs = (part[arrangement.tokens[hidden]] for part in (self.read.signs, self.read.outputs))
        patches[hidden] = likeliest(signs, outputs, patches[~hidden])
        reason = ""
        if search.residual > LARGEST_RESIDUAL:
            reason = (
                f"the views found leave {search.residual**0.5:.1%} of the head's gradient unexplained after "
                f"{search.evaluations} evaluations (--steps pixel_head=NUMBER for more; or tokens are in wrong places)"
            )
        sure = (misses < LARGEST_MISS) & ~hidden & (not reason)
        shape = (self.target.num_examples, len(self.masked))
        images = self.target.to_pixels(self.tokenizer.unpatchify(patches.view(*shape, -1))).float()
        known = sure.view(-1, 1, *self.tokenizer.grid)
        known = known.repeat_interleave(self.tokenizer.patch_size, 2).repeat_interleave(self.tokenizer.patch_size, 3)
        details = {
            "evaluations": search.evaluations,
            "sign_vectors": self.read.candidates,
            "masked": int(hidden.sum()),
            "head_residual": search.residual**0.5,
            "miss": float(misses.max()),
        }
        return Reconstruction(images, known, diagnosis=reason, details=details)


def _replaced_patch(model: nn.Module, tokenizer: Tokenizer) -> Tensor:
    """(P,) the patch whose projection is the model's mask token: of least norm; zeros where it has none."""
    parameters = dict(model.named_parameters())
    tokens = [p for n, p in parameters.items() if n.rpartition(".")[2] == MASK_TOKEN and p.numel() == tokenizer.width]
    projection = parameters[tokenizer.weight].detach().double().flatten(1)
    if not tokens:
        return projection.new_zeros(tokenizer.patch_dim)
    bias = parameters[tokenizer.bias].detach().double() if tokenizer.bias else 0.0
    return torch.linalg.lstsq(projection, (tokens[0].detach().double().flatten() - bias)[:, None]).solution[:, 0]
