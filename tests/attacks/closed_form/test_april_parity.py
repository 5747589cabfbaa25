"""`april` against the `breaching` package's AprilAttacker, on the same gradient of the same model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from attacks import ATTACKS
from fedmjp.metrics import score
from fedmjp.models import build_model
from tests.conftest import observe, photographs


@pytest.mark.parametrize("name", ["deit_s", "vit_ti"])
def test_same_image_as_breaching(name: str) -> None:
    analytic = pytest.importorskip("breaching.attacks.analytic_attack")
    model = build_model(name, num_classes=8, weights="random", block="april")
    image = photographs(224, 1)
    view = observe(model, image)
    ours = ATTACKS.get("april")()([view])

    order = ["cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias", "blocks.0.attn.qkv.weight"]
    shared = {"gradients": [view.gradients[n] for n in order]}
    patches = analytic.AprilAttacker.closed_form_april(SimpleNamespace(model=model.module), shared, solver="gelsd")
    theirs = view.to_pixels(analytic.AprilAttacker.recover_patch(patches)[None]).float()

    values = [float(score(x, image, patch_size=16)["psnr"][0]) for x in (ours.images, theirs)]
    assert values[0] == pytest.approx(values[1], abs=0.1)
    assert ours.diagnosis == ""
