"""Updates that look as if nothing could be read from them: of a saturated model, without positions (none in the model,
or none granted), of many bands."""

from __future__ import annotations

import dataclasses

import pytest
import timm
import torch
from flwr.app import ArrayRecord, MetricRecord

from attacks import Capability, ThreatModel
from attacks.mjp.patch_set import PatchSet
from attacks.mjp.placement import Placement
from attacks.observation import NEGLIGIBLE_NORM
from fedmjp.audit import Watcher, audit_gradient
from fedmjp.audit.verdict import Answer
from fedmjp.models import build_model
from tests.attacks.models import FixedPositions, timm_vit
from tests.audit.test_user_model import CLOSED, gradients_of
from tests.conftest import observe, photographs


@pytest.mark.parametrize("bias", [60.0, 80.0])  # norms of 1e-24 and 1e-33
def test_a_saturated_model_protects_nothing(bias: float) -> None:
    torch.manual_seed(0)
    model, image = timm_vit(), photographs(32, 1)
    model.head.bias.data[0] = bias
    audit = audit_gradient(model, image, gradients_of(model, image, [0]), attacks=("patch_embedding", "dlg"))
    assert float(audit.rows["gradient_norm"][0]) < NEGLIGIBLE_NORM
    assert audit.verdict.answer is Answer.LEAKS
    assert audit.verdict.certified == 1
    assert audit.verdict.psnr > 80
    # A search that repeats the client's step would compare round-off, and says so.
    assert "the update says nothing about the batch" in audit.diagnoses["dlg"]


def test_a_negligible_gradient_is_read_as_the_same_gradient_of_another_size(mini) -> None:
    view = observe(mini, photographs(64, 1))
    assert view.legible() is view
    bounds = {name: gradient.abs() for name, gradient in view.gradients.items()}
    tiny = dataclasses.replace(
        view,
        gradients={n: g * 2.0**-60 for n, g in view.gradients.items()},
        bounds={n: b * 2.0**-60 for n, b in bounds.items()},
    )
    read = tiny.legible()
    assert read is tiny.legible()
    assert 0.5 <= read.gradient_norm() < 1
    up = read.gradient_norm() / tiny.gradient_norm()
    for name, gradient in tiny.gradients.items():
        assert torch.equal(read.gradients[name].double(), gradient.double() * up)
        assert torch.equal(read.bounds[name].double(), tiny.bounds[name].double() * up)
    nothing = dataclasses.replace(view, gradients={n: torch.zeros_like(g) for n, g in view.gradients.items()})
    weights = dataclasses.replace(tiny, kind="weights")  # a difference of weights has no digits left
    assert nothing.legible() is nothing
    assert weights.legible() is weights


def test_a_watcher_says_that_patches_in_no_order_reproduce_the_update(tmp_path) -> None:
    built = build_model("vit_mini_32_nope", num_classes=10, weights="auto")
    view = observe(built, photographs(32, 1))
    attack = PatchSet(placement=Placement(restarts=1))
    options = {"mean": view.mean, "std": view.std, "sends": "gradient", "batch_size": 1, "local_steps": 1}
    watcher = Watcher(built.module, image_shape=(3, 32, 32), out=tmp_path / "leaks", attacks=(attack,), **options)
    sent = {"arrays": ArrayRecord(built.module.state_dict())}
    watcher(sent, {"arrays": ArrayRecord(view.gradients), "metrics": MetricRecord({"num-examples": 1})}, 7)
    assert not watcher.problems
    verdict = watcher.verdict()
    assert verdict.answer is Answer.PARTLY
    assert "the patches that patch_set found reproduce the update for 1 of 1 image" in verdict.headline()
    assert watcher.finish() == tmp_path / "leaks" / "report.html"


def test_images_of_four_bands_are_scored_and_saved(tmp_path) -> None:
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 4, "embed_dim": 96, "depth": 2, "num_heads": 3}
    model = timm.models.vision_transformer.VisionTransformer(in_chans=4, num_classes=5, **options)
    torch.nn.init.normal_(model.head.weight)
    image = torch.cat([photographs(32, 1), photographs(32, 2)[1:, :1]], dim=1)
    audit = audit_gradient(model, image, gradients_of(model, image, [1]), attacks=("patch_embedding",))
    assert audit.verdict.answer is Answer.LEAKS
    assert audit.rows["lpips"].isna().all()
    assert audit.save(tmp_path / "audit").is_file()


@pytest.mark.long
def test_without_the_position_gradient_granted_an_attack_that_needs_none_is_run() -> None:
    images = photographs(32, 1)
    observation = observe(build_model("vit_mini_32", num_classes=10, weights="auto"), images)
    options = {"mean": observation.mean, "std": observation.std}
    threat = ThreatModel(frozenset({Capability.MODEL_WEIGHTS}))
    audit = audit_gradient(observation.model, images, observation.gradients, threat_model=threat, **options)
    assert (audit.verdict.answer, audit.verdict.attack) == (Answer.LEAKS, "token_span")


def test_without_weights_no_answer_is_certified(mini) -> None:
    """Whether an answer reproduces the update cannot be computed then, however near it is."""
    images = photographs(64, 1)
    given = {"mean": mini.mean, "std": mini.std, "attacks": ("patch_embedding",)}
    for grants in ({Capability.POSITION_GRADIENT}, {Capability.POSITION_GRADIENT, Capability.MODEL_WEIGHTS}):
        audit = audit_gradient(
            mini.module, images, observe(mini, images).gradients, threat_model=ThreatModel(frozenset(grants)), **given
        )
        line = audit.table.set_index("attack").loc["patch_embedding"]
        assert line["psnr"] > 50
        assert line["certified"] == (Capability.MODEL_WEIGHTS in grants)


def test_fixed_positions_are_explained() -> None:
    torch.manual_seed(0)
    model, images = FixedPositions(), photographs(32, 1)
    audit = audit_gradient(model, images, gradients_of(model, images, [1]), attacks=CLOSED)
    reasons = dict.fromkeys(CLOSED, "no learnable position embedding") | {"unmix": "token_span gives the same answer"}
    assert all(reason in audit.diagnoses[name] for name, reason in reasons.items())
    assert audit.verdict.answer is Answer.NOT_TESTED
