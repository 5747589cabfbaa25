"""Inversion of an update whose head predicts the place of every patch (MP3), although no position gradient is sent.

The model has no position embedding, so that the update's trunk is the same for every order of the patches. But the rows
of its head are places: of token i the head's gradient holds (p_i - e_i) [h_i, 1]^T, e_i the unit vector of its place.
The image is searched whose tokens give this gradient (`attacks.heads.inversion`): K (D + 1) numbers, compared after a
forward pass, for (N - 1) N unknowns.

The head alone determines predictions and features of the tokens, by a fixed point (`attacks.heads.place_rows`). On
random weights, whose predictions are nearly uniform, it converges to them; on trained weights it has several solutions
and for some images reaches another one (benchmarks/objectives_leak.py counts them). So the search does not start from
it. But with the predictions of the image found, the same equations say token by token by how much its features miss
those that were read.

It cannot read a head over one token (of classes), a head whose rows are no places, a head that was asked for some
places only (DropPos), or a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attacks.heads.base import HeadAttack
from attacks.heads.context import read_context
from attacks.heads.encoder import Encoder
from attacks.heads.inversion import HeadSearch
from attacks.heads.place_rows import features_given, read_places
from attacks.linear.completion import render
from attacks.linear.dense_head import PLACES, DenseHead, Rows
from attacks.mjp.token_patches import known_span
from attacks.observation import Capability, Observation, Reconstruction
from attacks.tokenizer import find_tokenizer

# Relative squared residual of the head's gradient, and share of a token's features, above which nothing is vouched for.
LARGEST_RESIDUAL, LARGEST_MISS = 1e-5, 5e-3


@dataclass(frozen=True, kw_only=True)
class PositionHead(HeadAttack):
    """Search for the image whose tokens give the head of places its gradient.

    Args:
        steps: evaluations of the head's gradient, at most (those of line searches not counted).
    """

    steps: int = 200

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MODEL_WEIGHTS})
    rows: ClassVar[Rows] = PLACES

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`.

        `details` holds the evaluations, the relative residual of the head's gradient (head_residual), the largest share
        of a token's features that the head's gradient contradicts (miss), the largest difference of a probability from
        the one that the fixed point gives without an image (fixed_point), and the size of the context.
        """
        target = observations[-1]
        tokenizer = find_tokenizer(target.model, target.image_shape)
        head = PLACES.find(target, tokenizer)
        context = read_context(target, tokenizer)
        encoder = Encoder(target.model, tokenizer, head.name)
        search = HeadSearch(head, place_gradients, encoder, known_span(target, tokenizer), context)
        search.run(self.steps)
        tokens = search.tokens()
        misses, closed = token_misses(head, tokens), read_places(head)
        details = {
            "evaluations": search.evaluations,
            "head_residual": search.residual**0.5,
            "miss": float(misses.max()),
            "fixed_point": float((closed.probabilities - predictions(head, tokens)).abs().max()),
            "context": tokenizer.num_patches if context is None else context.count,
        }
        reason = ""
        if search.residual > LARGEST_RESIDUAL:
            reason = (
                f"the image found leaves {search.residual**0.5:.1%} of the head's gradient unexplained after "
                f"{search.evaluations} evaluations (--steps position_head=NUMBER for more)"
            )
        return render(target, tokenizer, search.patches, misses < LARGEST_MISS, reason, details)


def place_gradients(outputs: Tensor) -> Tensor:
    """d (N, N) of the mean cross-entropy of every token's own place, for logits (N, N)."""
    return (outputs.softmax(dim=1) - torch.eye(len(outputs)).to(outputs)) / len(outputs)


def predictions(head: DenseHead, tokens: Tensor) -> Tensor:
    """(N, N) probabilities of places for tokens (N, D)."""
    return (tokens @ head.weight.T + head.bias).softmax(dim=1)


def token_misses(head: DenseHead, tokens: Tensor) -> Tensor:
    """(N,) share of each token's features, (N, D), that differs from what the head's gradient says of them."""
    count, probabilities = len(tokens), predictions(head, tokens)
    missing = (probabilities - torch.eye(count).to(tokens)).T @ tokens - count * head.weight_gradient
    return features_given(probabilities, missing)[0].norm(dim=1) / tokens.norm(dim=1).mean()
