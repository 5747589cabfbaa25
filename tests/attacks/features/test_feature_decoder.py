"""Features of a batch from the classifier's gradient, and the images that are to be expected for them."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.func import jacrev

from attacks import ATTACKS, Capability, Observation, ThreatModel, UsageError
from attacks.classifier import classifier_gradient
from attacks.features.classifier_features import _Equations, classifier_features
from attacks.features.feature_decoder import FeatureDecoder, encoder
from attacks.features.linear_decoder import HELD_OUT, learn_decoder
from attacks.features.noise_images import noise_images
from attacks.features.photographs import photograph_crops
from fedmjp.audit.per_image import observe_together
from fedmjp.defenses.parameter_groups import belongs
from fedmjp.metrics import psnr
from fedmjp.models import BuiltModel, build_model
from tests.conftest import observe, photographs

CLASSES = 7


@pytest.fixture(scope="module")
def model() -> BuiltModel:
    return build_model("vit_micro8_32", num_classes=CLASSES, weights="random")


def head_of(view: Observation, *, granted: bool = True) -> Observation:
    """The update of a client that trains the classifier alone; labels are granted, or not."""
    gradients = {name: g for name, g in view.gradients.items() if belongs(name, ("head",))}
    return dataclasses.replace(view, gradients=gradients, labels=view.labels if granted else None)


def update(model: BuiltModel, labels: list[int], *, granted: bool = True) -> tuple[Observation, Tensor]:
    """The classifier's gradient of a batch, and its features by the module's own hook."""
    images, given = photographs(32, len(labels)), torch.tensor(labels)
    kept: list[Tensor] = []
    handle = model.module.head.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0].detach()))
    view = dataclasses.replace(observe(model, images, given), labels=given)
    handle.remove()
    return head_of(view, granted=granted), kept[-1].double()


def others(view: Observation) -> Tensor:
    """Features of noise."""
    with torch.no_grad():
        return encoder(view)(noise_images(32, view.image_shape, torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("granted", [True, False])
@pytest.mark.parametrize("labels", [[2], [4, 1], [0, 3, 5], [6, 2, 2], [1, 1, 1, 4, 0, 6]])
def test_features_are_those_of_the_forward_pass(model: BuiltModel, labels: list[int], granted: bool) -> None:
    view, truth = update(model, labels, granted=granted)
    found = classifier_features(view, others(view))
    near = torch.cdist(truth, found.values).min(dim=1)
    assert (near.values / truth.norm(dim=1)).max() < 1e-3
    assert len(set(near.indices.tolist())) == len(labels)
    assert found.labels[near.indices].tolist() == labels


def test_a_sum_over_clients_gives_the_features_of_each(model: BuiltModel) -> None:
    """What secure aggregation shows of three clients with an image each is the gradient of a batch of three."""
    images, labels = photographs(32, 3), torch.tensor([0, 3, 5])
    together = observe_together([observe(model, images[i : i + 1], labels[i : i + 1]) for i in range(3)])
    view, truth = update(model, labels.tolist())
    found = classifier_features(dataclasses.replace(head_of(together), labels=labels), others(view))
    assert (torch.cdist(truth, found.values).min(dim=1).values / truth.norm(dim=1)).max() < 1e-3


@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_rounded_messages_give_features_to_their_precision(model: BuiltModel, dtype: torch.dtype, error: float) -> None:
    view, truth = update(model, [0, 3, 5])
    rounded = dataclasses.replace(view, gradients={n: g.to(dtype).float() for n, g in view.gradients.items()})
    found = classifier_features(rounded, others(view))
    assert (torch.cdist(truth, found.values).min(dim=1).values / truth.norm(dim=1)).max() < error
    assert found.error > 1e-5


def test_the_jacobian_is_that_of_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, target = torch.randn(3, 5, generator=generator), torch.randn(5, 3, generator=generator)
    onehot, ones = torch.eye(5)[[0, 2, 2]].T, torch.randn(3, generator=generator)
    equations = _Equations(*(t.double() for t in (logits, onehot, target, ones)))
    m = torch.randn(3, 3, dtype=torch.float64, generator=generator)
    expected = jacrev(equations.misses)(m).flatten(1)
    torch.testing.assert_close(equations.jacobian(m), expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda view: dataclasses.replace(view, num_examples=8), "at most 6 images apart, and the update sums 8"),
        (lambda view: dataclasses.replace(view, num_examples=5), "shows 3 of the 5 images"),
        (lambda view: dataclasses.replace(view, local_steps=2), "not one step of cross-entropy"),
        (lambda view: dataclasses.replace(view, objective="jigsaw"), "not one step of cross-entropy"),
        (lambda view: dataclasses.replace(view, labels=torch.tensor([6, 6, 6])), "with the labels granted"),
        (lambda view: dataclasses.replace(view, gradients={"head.bias": view.gradients["head.bias"]}), "no gradient"),
    ],
)
def test_says_why_there_are_no_features(model: BuiltModel, change, words: str) -> None:
    view, _ = update(model, [0, 3, 5])
    with pytest.raises(UsageError, match=words):
        classifier_features(change(view), others(view))


def test_the_decoder_is_a_ridge_regression() -> None:
    """Against the stacked least squares problem that a ridge regression is; images are linear in the features here."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(12, 5, generator=generator, dtype=torch.float64) / 5
    batches = [torch.rand(40, 3, 2, 2, generator=generator) for _ in range(3)]
    found = learn_decoder(lambda images: images.flatten(1).double() @ mix, iter(batches))
    kept = torch.cat([b[torch.arange(40) % HELD_OUT != 0] for b in batches]).flatten(1).double()
    x, y = kept @ mix, kept
    middle, root = x.mean(dim=0), (found.penalty * len(x)) ** 0.5
    left = torch.cat([x - middle, root * torch.eye(5, dtype=torch.float64)])
    right = torch.cat([y - y.mean(dim=0), torch.zeros(5, 12, dtype=torch.float64)])
    expected = (x[:4] - middle) @ torch.linalg.lstsq(left, right).solution + y.mean(dim=0)
    torch.testing.assert_close(found(x[:4]).flatten(1).double(), expected.clamp(0, 1), atol=1e-5, rtol=0)
    assert found.gain > 0
    assert found.examples.shape == (15, 5)


def test_brings_photographs_nearer_than_their_mean(model: BuiltModel) -> None:
    """A feature of 64 channels holds brightness and layout; learned from noise, of batches of three."""
    images, labels = photographs(32, 24), torch.tensor([0, 3, 5])
    views = [head_of(dataclasses.replace(observe(model, some, labels), labels=labels)) for some in images.split(3)]
    found = FeatureDecoder(images=8192).attack_many([[view] for view in views])
    assert all("the classifier's input of 3 images is known to" in answer.diagnosis for answer in found)
    assert not any(answer.known.any() for answer in found)
    assert all(answer.labels.equal(labels) for answer in found)
    mean = images.mean(dim=(0, 2, 3), keepdim=True).expand_as(images)
    decoded = torch.cat([answer.images for answer in found])
    gains = psnr(decoded, images) - psnr(mean, images)
    assert gains.mean() > 1.0, gains
    assert found[0].details["held_out_gain"] > 1.0


def test_many_at_once_is_one_by_one(model: BuiltModel) -> None:
    attack = FeatureDecoder(images=320)
    cases = [[update(model, labels)[0]] for labels in ([1], [2, 5])]
    for alone, together in zip(map(attack, cases), attack.attack_many(cases), strict=True):
        torch.testing.assert_close(alone.images, together.images)


def test_the_decoder_follows_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learned once for the clients of a round, and anew where weights or settings change."""
    learned: list[int] = []
    module = sys.modules[FeatureDecoder.__module__]
    monkeypatch.setattr(module, "learn_decoder", lambda *given: learned.append(1) or learn_decoder(*given))
    model = build_model("vit_micro8_32", num_classes=CLASSES, weights="random")
    view, _ = update(model, [1])
    attack = FeatureDecoder(images=160)
    first, again = attack([view]), attack([view])
    assert learned == [1]
    torch.testing.assert_close(first.images, again.images, rtol=0, atol=0)
    with torch.no_grad():
        model.module.head.bias[0] += 0.5
    attack([view])
    FeatureDecoder(images=160, seed=1)([view])
    assert len(learned) == 3


def test_leaves_the_observed_model_as_it_was() -> None:
    """Its batch norm's statistics move with every image that passes in training mode."""
    layers = nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    cnn = nn.Sequential(*layers, nn.Linear(4, CLASSES)).train()
    before = {name: tensor.clone() for name, tensor in cnn.state_dict().items()}
    view = Observation({}, cnn, 1, (3, 32, 32), (0.5,) * 3, (0.25,) * 3)
    encode = encoder(dataclasses.replace(view, gradients={n: torch.ones_like(p) for n, p in cnn.named_parameters()}))
    one, both = (encode(photographs(32, count)) for count in (1, 2))
    torch.testing.assert_close(both[:1], one)
    assert all(torch.equal(before[name], tensor) for name, tensor in cnn.state_dict().items())
    assert cnn.training


def test_learns_from_a_folder_of_photographs(model: BuiltModel, tmp_path: Path) -> None:
    for number, image in enumerate(photographs(64, 6)):
        Image.fromarray((image.permute(1, 2, 0) * 255).byte().numpy()).save(tmp_path / f"{number}.png")
    (tmp_path / "notes.txt").write_text("no image")
    crops = list(photograph_crops(str(tmp_path), [4, 3], (3, 32, 32), seed=0))
    assert [len(batch) for batch in crops] == [4, 3]
    assert all(float(batch.std()) > 0.05 and 0 <= float(batch.min()) <= float(batch.max()) <= 1 for batch in crops)
    again = torch.cat(list(photograph_crops(str(tmp_path), [7], (3, 32, 32), seed=0)))
    torch.testing.assert_close(torch.cat(crops), again)
    attack = FeatureDecoder(images=320, photographs=str(tmp_path))
    assert attack([update(model, [1])[0]]).images is not None
    assert attack.used() - attack.needs == {Capability.AUXILIARY_DATA}
    with pytest.raises(UsageError, match="auxiliary_data"):
        attack.require(ThreatModel(), "feature_decoder")


@pytest.mark.parametrize(("folder", "words"), [("", "holds no image"), ("nowhere", "no folder of photographs")])
def test_names_a_folder_that_is_of_no_use(model: BuiltModel, tmp_path: Path, folder: str, words: str) -> None:
    found = FeatureDecoder(photographs=str(tmp_path / folder))([update(model, [1])[0]])
    assert found.images is None
    assert words in found.diagnosis


def test_names_a_photograph_that_cannot_be_read(model: BuiltModel, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"no image")
    found = FeatureDecoder(photographs=str(tmp_path))([update(model, [1])[0]])
    assert "broken.png cannot be read" in found.diagnosis


def test_has_nothing_to_add_to_whole_updates(model: BuiltModel) -> None:
    attack, view = ATTACKS.get("feature_decoder")(), observe(model, photographs(32, 1))
    assert "patch_embedding uses them" in attack.obstacle([view])
    assert "by name for the features of the batch" in attack.obstacle([observe(model, photographs(32, 2))])
    assert attack.obstacle([head_of(view)]) == ""
    assert classifier_gradient(head_of(view)).shape == (CLASSES, 65)
    without = dataclasses.replace(view, gradients={n: g for n, g in view.gradients.items() if n != "head.bias"})
    assert "no gradient of a classifier" in attack.obstacle([without])


def test_a_model_without_tokens_is_no_obstacle() -> None:
    """A suite asks every attack, of convolutional models too."""
    cnn, images = build_model("resnet_micro_32", num_classes=8, weights="random"), photographs(32, 1)
    cnn.module.eval()
    view = observe(cnn, images)
    attack = ATTACKS.get("feature_decoder")(images=16)
    assert attack.obstacle([view]) == ""
    assert attack.estimated_seconds([view]) > 0
