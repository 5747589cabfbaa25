"""Masked Jigsaw Puzzle (Liu, Ren et al., "Masked Jigsaw Puzzle: A Versatile Position Embedding for Vision
Transformers", first named "Breaking the Chain of Gradient Leakage in Vision Transformers").

A share gamma of the patches, chosen in blocks, is shuffled among itself; the model sees one shared unknown position
embedding at those places (equations 6-7), and a dense absolute localisation loss (equation 4) teaches the visible
position embeddings their place. On models without position embeddings (Swin, ResNet, _nope) only the jigsaw acts.

The paper's ablation (its Table 2) is in the options: `positions` own is JP, index JP+IDX, unknown JP+UNK; `dal` is DAL.
Only unknown hides anything: with own every visible place sends its gradient, and with index the two tables' gradients
hold the same rows in two orders, so that a batch of one shows the server its permutation.

The released code (github.com/yhlleo/MJP) jigsaws each step with probability 0.5, none in its first 20 epochs, draws one
mask and one permutation for the whole batch, by a sampler of its own (`masking.released_masks`), and moves lambda: up
from 0 over those epochs, then down to half by a cosine (not done here). The defaults here are the paper's: every step,
every image its own, lambda fixed. The distance of equation 4 is the sum over both coordinates; the code, and the
default here, take their mean (`dal_distance`).

About IDX the paper says that additional embeddings encode the patches' global indices. By default a patch brings the
embedding of the place that it came from (`index_of` origin). The released code adds row i of the second table at place
i, whatever patch was moved there (`index_of` place): the two tables' sum is one more position embedding, which says
nothing of the jigsaw. Its table begins at zero and has a row for the class token; ours does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import tyro

from attacks.registry import UsageError
from fedmjp.defenses.base import ClientInput, Defense
from fedmjp.models import MODELS, split_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedmjp.models import BuiltModel


@dataclass(frozen=True)
class MaskedJigsawPuzzle(Defense):
    """Options of --defense mjp."""

    random: ClassVar[bool] = True
    moves_patches: ClassVar[bool] = True
    hides_positions: ClassVar[bool] = True
    known_by: ClassVar[tuple[str, ...]] = ("mjp_subspace", "mjp_mixture", "mjp_rounds", "unmix", "unmix_rounds")
    known_beside_others: ClassVar[tuple[str, ...]] = ("noisy_rounds",)

    added: ClassVar[tuple[str, ...]] = ("mask_sampler", "mask_choice", "mask_key", "index_of", "dal_distance")

    gamma: float = 0.9
    """Share of patches that are masked and shuffled, in [0, 1]. The paper attacks at 0.9 and trains best at 0.1."""
    jigsaw_probability: float = 1.0
    """Probability that a step is jigsawed at all (released code: 0.5)."""
    jigsaw_warmup: int = 0
    """Rounds at the start without jigsaw (released code: 20 epochs)."""
    jigsaw_per: Literal["image", "batch"] = "image"
    """Draw mask and permutation for each image, or once for the batch (released code: batch)."""
    mask_sampler: Literal["exact", "released"] = "exact"
    """Masks of exactly round(gamma N) patches, or as the released code draws them, of at most floor(gamma N)."""
    mask_choice: Literal["block", "random", "attention", "attended", "fixed"] = "block"
    """Patches to mask: blocks drawn in every step, single patches drawn in every step, those that the model's class
    token attends to least (attention, as MST) or most (attended), or blocks that an image keeps for its whole life."""
    mask_key: int = 0
    """With --mask-choice fixed, the client's number, from which and the image the mask follows; not to be shown to the
    server."""
    positions: Literal["unknown", "own", "index"] = "unknown"
    """Position embedding at shuffled places: unknown (trains NAME_mjp), the place's own, or index: the place's own and
    one of where the patch came from (trains NAME_idx)."""
    index_of: Literal["origin", "place"] = "origin"
    """With --positions index, whose row of the second table a patch gets: that of the place it came from, or of the
    place where it is shown (released code: place)."""
    dal: Literal["none", "pca", "linear", "nonlinear"] = "nonlinear"
    """Map of the dense absolute localisation loss (the paper's best: nonlinear)."""
    dal_weight: Annotated[float, tyro.conf.arg(metavar="LAMBDA")] = 0.01
    """Weight lambda of the localisation loss (paper: 0.01)."""
    dal_distance: Literal["mean", "sum"] = "mean"
    """Over a patch's two coordinates: their mean (released code), or their sum (equation 4: twice the mean)."""

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
        for option in ("gamma", "jigsaw_probability"):
            if not 0 <= getattr(self, option) <= 1:
                raise UsageError(f"--{option.replace('_', '-')} must lie in [0, 1], not {getattr(self, option)}")
        if self.jigsaw_warmup < 0 or self.dal_weight < 0:
            raise UsageError("--jigsaw-warmup and --dal-weight must not be negative")
        if not 0 <= self.mask_key < 2**63:
            raise UsageError(f"--mask-key must lie in 0..2^63 - 1, not {self.mask_key}")
        if self.mask_choice not in ("block", "fixed") and self.mask_sampler == "released":
            raise UsageError(
                f"--mask-sampler released draws blocks, and --mask-choice {self.mask_choice} none; drop one"
            )
        if self.mask_choice not in ("block", "random") and self.jigsaw_per == "batch":
            raise UsageError(f"--mask-choice {self.mask_choice} masks each image by itself; drop --jigsaw-per batch")

    def model_name(self, name: str) -> str:
        """The variant of a plain ViT that has what the options speak of; any other name as it is.

        Raises:
            UsageError: a variant whose forward pass does not take what --positions gives it, or attention asked of a
                model that has none.
        """
        base, variant = split_name(name)
        if self.mask_choice in ("attention", "attended") and MODELS.get(base).vit is None:
            raise UsageError(f"--mask-choice {self.mask_choice} asks a class token, and {name} has none; name a ViT")
        fitting = {"unknown": "_mjp", "index": "_idx", "own": "_mjp" if self.dal != "none" else ""}[self.positions]
        if (variant, self.positions) in (("_mjp", "index"), ("_idx", "unknown")):
            raise UsageError(f"--positions {self.positions} trains {base}{fitting}; pass --model {base}, not {name}")
        return base + fitting if variant == "" and MODELS.get(base).vit is not None else name

    def on_input(self, images: Tensor, model: BuiltModel, generator: torch.Generator, round: int) -> ClientInput:
        """Mask and jigsaw (equation 7). The generator's device only draws; the images stay on theirs."""
        import torch

        from fedmjp.defenses.masking import jigsaw_order, move_patches

        skipped = torch.rand((), generator=generator, device=generator.device) >= self.jigsaw_probability
        if round <= self.jigsaw_warmup or bool(skipped):
            return ClientInput(images)
        mask = self._mask(images, model, generator)
        order = jigsaw_order(mask, generator)
        mask, order = (t.to(images.device).expand(len(images), -1) for t in (mask, order))
        rearrange = partial(move_patches, order=order, patch_size=model.patch_size)
        hides = self.positions == "unknown" and model.hides_positions
        tells = self.positions == "index" and model.tells_origins and self.index_of == "origin"
        return ClientInput(rearrange(images), mask if hides else None, order if tells else None, rearrange)

    def _mask(self, images: Tensor, model: BuiltModel, generator: torch.Generator) -> Tensor:
        """The patches to hide, (B, N) bool, or (1, N) for the whole batch."""
        from fedmjp.defenses import mask_choice, masking

        sampler = masking.released_masks if self.mask_sampler == "released" else masking.block_masks
        if self.mask_choice == "fixed":
            return mask_choice.fixed_masks(images, model.grid, self.gamma, sampler, self.mask_key)
        if self.mask_choice in ("attention", "attended"):
            return mask_choice.attention_masks(images, model, self.gamma, most=self.mask_choice == "attended")
        draws = 1 if self.jigsaw_per == "batch" else len(images)
        sampler = masking.scattered_masks if self.mask_choice == "random" else sampler
        return sampler(draws, model.grid, self.gamma, generator)

    def loss_weights(self) -> Mapping[str, float]:
        """The localisation loss; its term is a mean over coordinates, so equation 4's sum has twice the weight."""
        coordinates = 2 if self.dal_distance == "sum" else 1
        return {} if self.dal == "none" else {"dal": coordinates * self.dal_weight}
