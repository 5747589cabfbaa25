"""What every attack is held to, by what it claims to do: the same checks for built-in attacks and other packages'.

A row of a table of attacks is a `Traits`; the checks take any `Attack` instance with its traits.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from attacks import ATTACKS, Attack, Observation, Reconstruction
from attacks.policies import PUBLISHED, read_policies
from attacks.transformations import transform_images
from fedmjp.defenses import DEFENSES
from fedmjp.metrics import score
from fedmjp.models import BuiltModel, build_model
from fedmjp.models.low_rank import add_low_rank
from tests.attacks.active.contexts import before
from tests.conftest import observe, observe_under, photographs


@dataclass(frozen=True)
class Traits:
    """What an attack claims.

    Attributes:
        exact_on: (first block, precision of the gradient, PSNR in dB that it exceeds on a photograph at 64 pixels).
        needs_positions: works from the gradient of the position embedding.
        needs_table: works on models that add a position embedding.
        single_image: takes one image of a batch of one; larger batches are diagnosed.
        single_step: takes the gradient of one local step; sums over several are diagnosed.
        reads_masks: works on an update that hides some positions, without a diagnosis.
        vouches: marks the pixels that it knows.
        without_table: works only on models that add no position embedding.
        own: makes the update that it works on, where that is not a classifier's.
        images: of the batch that it takes.
    """

    exact_on: tuple[tuple[str, torch.dtype, float], ...] = ()
    needs_positions: bool = True
    needs_table: bool = True
    single_image: bool = True
    single_step: bool = True
    reads_masks: bool = False
    vouches: bool = True
    without_table: bool = False
    own: Callable[[], Observation] | None = None
    images: int = 1


def psnr(found: Reconstruction, image: torch.Tensor) -> float:
    """dB over the whole image."""
    return float(score(found.images.to(image), image, patch_size=8)["psnr"][0])


def small(variant: str = "", **options) -> BuiltModel:
    """The ViT for 64 pixels, random weights."""
    return build_model(f"vit_mini_64{variant}", num_classes=8, weights="random", **options)


def changed(images: int = 1, **changes) -> Observation:
    """The update of an april block, one of its attributes changed."""
    return observe(small(block="april"), photographs(64, images), **changes)


def no_positions() -> Observation:
    """A model without position embedding."""
    return observe(small("_nope"), photographs(64, 1))


def masked() -> Observation:
    """20 of 64 positions hidden."""
    mask = torch.zeros(1, 64, dtype=torch.bool)
    mask[0, 10:30] = True
    return observe(small("_mjp", block="april"), photographs(64, 1), mask=mask)


def places_predicted() -> Observation:
    """MP3: every patch's place is predicted, without position embedding."""
    return observe_under("mp3:eta=0.5", "vit_micro8_32", photographs(32, 1))


def low_rank() -> Observation:
    """Every linear layer of attention has factors (LoRA) of a rank above the number of tokens, in mid-training."""
    built = small()
    add_low_rank(built.module, ["*attn.qkv"], rank=80, alpha=80.0)
    nn.init.normal_(built.module.blocks[0].attn.qkv.lora_B, std=0.1)
    return observe(built, photographs(64, 1))


def pixels_restored() -> Observation:
    """MST: two views of a photograph without uniform patches are restored."""
    return observe_under("mst:local_crops=0,outputs=16,hidden=16,bottleneck=8", "vit_micro8_32", photographs(32, 8)[7:])


def transformed() -> Observation:
    """A photograph after the published pair of policies."""
    images = transform_images(photographs(64, 1), read_policies(PUBLISHED), torch.Generator().manual_seed(0))
    return observe(small(), images)


def prepared_by(name: str, defense: str = "none", **settings) -> Observation:
    """The first round of an attack that chooses what is sent, on a batch of one image of class 0."""
    built, attack = small(adapt=DEFENSES.get(defense)().adapt), ATTACKS.get(name)(**settings)
    sending = attack.send(before(built, (3, 64, 64)))
    return observe(dataclasses.replace(built, module=sending.model(built.module, (3, 64, 64))), photographs(64, 1))


def withheld() -> Observation:
    """The position embedding's gradient is not part of the update."""
    view = observe(small(), photographs(64, 1))
    return dataclasses.replace(view, gradients={n: g for n, g in view.gradients.items() if n != "pos_embed"})


def projection_withheld() -> Observation:
    """The patch projection's gradient is not part of the update."""
    view = observe(small(), photographs(64, 1))
    left = {n: g for n, g in view.gradients.items() if not n.startswith("patch_embed.")}
    return dataclasses.replace(view, gradients=left)


def first_block_withheld() -> Observation:
    """Neither the position embedding's nor the first block's gradients are part of the update."""
    view = observe(build_model("vit_micro8_32", num_classes=8, weights="random"), photographs(32, 1))
    gone = ("pos_embed", "blocks.0.")
    return dataclasses.replace(view, gradients={n: g for n, g in view.gradients.items() if not n.startswith(gone)})


def vanished() -> Observation:
    """Every gradient zero."""
    view = changed()
    return dataclasses.replace(view, gradients={n: torch.zeros_like(g) for n, g in view.gradients.items()})


def convolutional() -> Observation:
    """A model without patches."""
    return dataclasses.replace(changed(), model=nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)))


def two_images() -> Observation:
    """A batch of two."""
    return changed(images=2)


def four_steps() -> Observation:
    """The sum of four local steps."""
    return changed(local_steps=4, kind="weights")


# What stands in the way, and which attacks it stops.
OBSTACLES: list[tuple[Callable[[], Observation], Callable[[Traits], bool]]] = [
    (no_positions, lambda traits: traits.needs_table),
    (withheld, lambda traits: traits.needs_positions),
    (masked, lambda traits: not traits.reads_masks and not traits.without_table),
    (two_images, lambda traits: traits.single_image),
    (four_steps, lambda traits: traits.single_step),
    (vanished, lambda traits: True),
    (convolutional, lambda traits: True),
]


def check_recovers(attack: Attack, traits: Traits, block: str, precision: torch.dtype, threshold: float) -> None:
    """A photograph comes back, and the attack says that it is known."""
    model, image = small(block=block), photographs(64, 1).to(precision)
    model.module.to(precision)
    found = attack([observe(model, image)])
    assert found.diagnosis == ""
    assert not traits.vouches or found.known.all()
    assert psnr(found, image) > threshold


class Holder(nn.Module):
    """A model of one's own with a ViT as a part."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.vit(images)


def held(view: Observation) -> Observation:
    """The same update of a model that holds the ViT as a part."""
    gradients = {f"vit.{name}": gradient for name, gradient in view.gradients.items()}
    return dataclasses.replace(view, model=Holder(view.model).eval(), gradients=gradients)


def check_repeats(
    attack: Attack, traits: Traits, again: Callable[[Observation], Observation] = lambda view: view
) -> None:
    """The same update gives the same image, and is let go: nothing that was made of it holds it in a circle.

    Args:
        again: the update as it is given the second time.
    """
    view = traits.own() if traits.own else None
    if view is None:
        view = observe(small("_nope" if traits.without_table else ""), photographs(64, traits.images))
    gc.disable()
    try:
        first, second = attack([view]), attack([again(view)])
        assert torch.equal(first.images, second.images)
        left = weakref.ref(view)
        del view
        assert left() is None
    finally:
        gc.enable()


def check_obstacle(attack: Attack, make: Callable[[], Observation]) -> Reconstruction:
    """What stands in the way is said in words, and nothing is vouched for."""
    found = attack([make()])
    assert len(found.diagnosis) > 20
    assert not found.diagnosis.startswith("the attack failed")
    assert found.images is None or found.known is None or not found.known.any()
    return found


def check_nan(attack: Attack) -> None:
    """NaN in a gradient is an error that names the parameter."""
    view = observe(small(), photographs(64, 1))
    view.gradients["pos_embed"][0, 3, 5] = float("nan")
    with pytest.raises(ValueError, match="pos_embed.*not finite"):
        attack([view])


def check_many(attack: Attack) -> None:
    """Clients attacked together get the answers of clients attacked alone."""
    images = photographs(64, 3)
    views = [observe(small(), images[:1]), observe(small(seed=1, block="april"), images[1:2])]
    views += [masked(), no_positions(), vanished(), observe(small(), images[2:])]
    together = attack.attack_many([[view] for view in views])
    for view, found in zip(views, together, strict=True):
        alone = attack([view])
        assert found.diagnosis == alone.diagnosis
        assert (found.images is None) == (alone.images is None)
        if alone.images is not None:
            torch.testing.assert_close(found.images, alone.images, atol=1e-5, rtol=0)


def check_second_table(attack: Attack) -> None:
    """What a table of origins adds to a token is in no message, and no attack works it out."""
    model = build_model("vit_micro_32_idx", num_classes=8, weights="random")
    found = attack([observe(model, photographs(32, 1))])
    assert found.images is None
    assert "second table of embeddings to its tokens (idx_embed)" in found.diagnosis
