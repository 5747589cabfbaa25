"""Frozen parameters that an update holds zeros for: attacks, their choice and the certificate leave them out."""

from __future__ import annotations

import torch

from attacks import ATTACKS, Observation, ThreatModel
from attacks.certificate import certify, reproduce
from attacks.features.later_block import LaterBlock
from attacks.frozen import without_frozen
from fedmjp.audit import audit_gradient
from fedmjp.audit.suite import select_attacks
from fedmjp.metrics import psnr
from fedmjp.models import build_model
from tests.conftest import observe, photographs

FIRST = ("patch_embed", "pos_embed", "cls_token", "blocks.0")


def frozen(*starts: str, name: str = "vit_micro_32", zeros: bool = True, images: int = 1) -> Observation:
    """The update of a client that froze the parameters whose names begin so, which sends zeros for them or nothing."""
    view = observe(build_model(name, num_classes=5, weights="random"), photographs(32, images))
    gradients = {n: torch.zeros_like(g) if n.startswith(starts) else g for n, g in view.gradients.items()}
    if not zeros:
        gradients = {n: g for n, g in gradients.items() if not n.startswith(starts)}
    return Observation(gradients, view.model, images, view.image_shape, view.mean, view.std)


def test_zeros_are_left_out_but_those_of_positions() -> None:
    view = frozen("blocks.0", "pos_embed")
    assert set(without_frozen(view).gradients) == set(frozen("blocks.0", zeros=False).gradients)
    assert without_frozen(view) is without_frozen(view)  # what was derived from it is kept
    honest = frozen()
    assert without_frozen(honest) is honest
    nothing = frozen("")
    assert without_frozen(nothing) is nothing


def test_places_that_no_image_shows_stay() -> None:
    """The shared embedding of an update that hides nothing is zero, and says so."""
    view = frozen(name="vit_micro_32_mjp")
    assert not view.gradients["unk_embed"].any()
    assert "unk_embed" in without_frozen(view).gradients


def test_the_same_attacks_are_chosen() -> None:
    with_zeros, without = (
        select_attacks(["auto"], [frozen(*FIRST, zeros=zeros)], ThreatModel(), budget=10.0) for zeros in (True, False)
    )
    assert set(with_zeros.chosen) == set(without.chosen)
    assert "later_block" not in with_zeros.left_out


def test_spans_of_zeros_are_not_decomposed() -> None:
    attack = ATTACKS.get("unmix")()
    view = frozen("blocks.0", "pos_embed", name="vit_mini_32_mjp")
    assert not attack([view]).diagnosis.startswith("the attack failed")


def test_active_attacks_are_given_all() -> None:
    view = frozen("blocks.0")
    assert ATTACKS.get("imprint")().as_read([view])[0] is view
    assert all(ATTACKS.get(name)().as_read([view])[0] is without_frozen(view) for name in ("dlg", "gauss_newton"))


def test_later_blocks_are_read_as_without_the_zeros() -> None:
    found, expected = (LaterBlock(steps=2)([frozen(*FIRST, zeros=zeros)]) for zeros in (True, False))
    torch.testing.assert_close(found.images, expected.images)


def test_an_exact_answer_is_certified() -> None:
    view = frozen("blocks.0")
    found = ATTACKS.get("patch_embedding")()([view])
    assert psnr(found.images, photographs(32, 1))[0] > 50
    certified, residual = certify(view, found)
    assert certified
    assert residual < 1e-4
    assert reproduce(view, photographs(32, 1))[0] < 1e-4


def test_an_audit_says_what_was_frozen() -> None:
    view = frozen("blocks.0")
    options = {"mean": view.mean, "std": view.std, "attacks": ("patch_embedding",)}
    audit = audit_gradient(view.model, photographs(32, 1), view.gradients, **options)
    assert "holds nothing but zeros for blocks.0.norm1.weight" in str(audit)
    assert "differs" not in str(audit)
