"""Fishing: who sends a gradient through a classifier that the server set, and what comes back of a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks import ATTACKS, Capability, Observation, Reconstruction, ThreatModel, UsageError
from attacks.active.classifier_attack import ClassifierAttack
from attacks.active.feature_fishing import Probe, difference, next_threshold
from attacks.active.fishing import next_class
from attacks.active.head import SetHead
from attacks.memory import remember
from fedmjp.audit.harness import score_found, scorer
from fedmjp.audit.observe import model_as_sent
from fedmjp.audit.per_image import observe_groups
from fedmjp.defenses import DEFENSES, ClientInput
from fedmjp.models import BuiltModel, build_model
from tests.attacks.active.contexts import before
from tests.attacks.contract import psnr
from tests.attacks.models import timm_vit, torchvision_vit
from tests.conftest import observe, photographs

LABELS = torch.tensor([3, 0, 5, 6, 3])
GRANTED = frozenset(
    {Capability.ACTIVE_PARAMETERS, Capability.MODEL_WEIGHTS, Capability.POSITION_GRADIENT, Capability.SEVERAL_ROUNDS}
)


def micro(weights: str = "random", name: str = "vit_micro_32") -> BuiltModel:
    return build_model(name, num_classes=200 if name.startswith("vit_mini_64") else 10, weights=weights)


def answer_to(
    attack: ClassifierAttack, built: BuiltModel, images: Tensor, labels: Tensor, history: list[Observation]
) -> tuple[Observation, Reconstruction]:
    """One round: what the server sends, the client's update, and what the server reads from it."""
    shape = (3, built.image_size, built.image_size)
    sent = model_as_sent(built.module, attack.send(before(built.module, shape, history)).parameters)
    view = observe(replace(built, module=sent), images, labels)
    found = attack([*history, view])
    history.append(remember(view, attack.remembered_layers(sent, shape)))
    return view, found


def own_gradients(built: BuiltModel, module: nn.Module, images: Tensor, labels: Tensor) -> list[Tensor]:
    """The oracle: every image's gradient at all parameters below the classifier, one image at a time, (n,) each."""
    below = [p for n, p in module.named_parameters() if not n.startswith("head.")]
    found = []
    for image, label in zip(images, labels, strict=True):
        loss = functional.cross_entropy(module(built.normalise(image[None])), label[None])
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, below)]))
    return found


def test_only_the_target_class_sends_a_gradient() -> None:
    built, images = micro(), photographs(32, 4).double()
    built.module.double()
    sent = model_as_sent(
        built.module, ATTACKS.get("fishing")(target=5).send(before(built.module, (3, 32, 32))).parameters
    )
    norms = torch.stack([g.norm() for g in own_gradients(built, sent, images, LABELS[:4])])
    assert norms[2] > 1e-3
    assert (norms[[0, 1, 3]] <= 1e-12 * norms[2]).all()


def test_a_difference_of_two_thresholds_is_the_gradient_of_the_images_between() -> None:
    built, images, attack = micro(), photographs(32, 5).double(), ATTACKS.get("feature_fishing")(target=3)
    built.module.double()
    history: list[Observation] = []
    for _ in range(4):
        answer_to(attack, built, images, LABELS, history)
    sent = model_as_sent(built.module, attack.send(before(built.module, (3, 32, 32), history)).parameters)
    direction = sent.head.weight[3] / sent.head.weight[3].norm()
    below = [sent.pos_embed, sent.patch_embed.proj.weight]
    features, gradients = [], []
    for image in images:
        tokens = sent.forward_features(built.normalise(image[None]))
        feature = sent.forward_head(tokens, pre_logits=True)[0] @ direction
        features.append(float(feature.detach()))
        gradients.append([g / len(images) for g in torch.autograd.grad(feature, below)])
    views = {-float((v.model.head.bias[3] / v.model.head.weight[3].norm()).detach()): v for v in history}
    low, high = sorted(views)[:2]
    between = [i for i, f in enumerate(features) if low < f < high]
    assert 0 < len(between) < 5
    found = difference(Probe(low, 0.0, 0.0, views[low]), Probe(high, 0.0, 0.0, views[high]))
    for name, place in (("pos_embed", 0), ("patch_embed.proj.weight", 1)):
        expected = sum(gradients[i][place] for i in between)
        assert float((found[name] - expected).norm() / expected.norm()) < 1e-9


@pytest.mark.parametrize("name", ["fishing", "feature_fishing"])
def test_every_image_of_a_batch_comes_back(name: str) -> None:
    built, images, attack = micro("auto", "vit_mini_32"), photographs(32, 6), ATTACKS.get(name)()
    labels = torch.tensor([1, 8, 0, 4, 9, 3]) if name == "fishing" else torch.tensor([2, 2, 2, 0, 0, 7])
    history: list[Observation] = []
    best = torch.zeros(6)
    for _ in range(7):
        _, found = answer_to(attack, built, images, labels, history)
        if found.images is not None:
            assert found.diagnosis == ""
            assert found.known.all()
            records = score_found(attack, name, [found], [images], scorer(4, None))[0].records
            best = best.maximum(torch.tensor([record["psnr"] for record in records]).nan_to_num(0.0))
    assert best.min() > 60


def with_localisation(built: BuiltModel, images: Tensor, labels: Tensor, mask: Tensor) -> Observation:
    """The update of a client under MJP, the localisation loss of all its images included."""
    labels, weights = labels[: len(images)], DEFENSES.get("mjp")().loss_weights()
    return observe_groups(built, ClientInput(images, mask), labels, len(images), weights)[0]


def test_masks_that_differ_between_images_are_read_from_the_one_that_sends() -> None:
    built, images, attack = micro("auto", "vit_mini_64_mjp"), photographs(64, 4), ATTACKS.get("fishing")(target=5)
    mask = torch.rand(4, 64, generator=torch.Generator().manual_seed(0)) < 0.1
    sent = model_as_sent(built.module, attack.send(before(built.module, (3, 64, 64))).parameters)
    view = with_localisation(replace(built, module=sent), images, LABELS[:4], mask)
    found = attack([view])
    assert found.details["masked"] == int(mask[2].sum())
    alone = attack([with_localisation(replace(built, module=sent), images[2:3], LABELS[2:3], mask[2:3])])
    torch.testing.assert_close(found.images, alone.images, atol=2e-3, rtol=0)
    honest = with_localisation(built, images, LABELS[:4], mask)
    assert not (honest.gradients["pos_embed"][0, 1:].abs().amax(dim=1) == 0)[mask[2]].any()


@pytest.mark.parametrize("rate", [1e-1, 1e-4])
def test_images_are_counted_in_returned_weights(rate: float) -> None:
    """At the small rate the bias of the target does not change by as much as a digit of float32."""
    built, images, attack = micro("auto", "vit_mini_32"), photographs(32, 4), ATTACKS.get("fishing")(target=5)
    view, _ = answer_to(attack, built, images, LABELS[:4], [])
    sent = dict(view.model.named_parameters())
    gradients = {n: (sent[n] - (sent[n] - rate * g)).detach() / rate for n, g in view.gradients.items()}
    found = attack([replace(view, gradients=gradients, kind="weights", learning_rate=rate)])
    assert found.details["senders"] == 1
    assert found.labels.tolist() == [0, 3, 5, 6]
    assert psnr(found, images[2:3]) > 25


def test_the_mean_of_several_clients_is_one_batch() -> None:
    built, images, attack = micro("auto", "vit_mini_32"), photographs(32, 6), ATTACKS.get("fishing")(target=6)
    labels = torch.tensor([3, 0, 5, 3, 6, 5])
    sent = replace(built, module=model_as_sent(built.module, attack.send(before(built.module, (3, 32, 32))).parameters))
    clients = [observe(sent, images[i : i + 2], labels[i : i + 2]) for i in (0, 2, 4)]
    mean = {name: sum(c.gradients[name] for c in clients) / 3 for name in clients[0].gradients}
    found = attack([replace(clients[0], gradients=mean, num_examples=6)])
    assert found.labels.tolist() == sorted(labels.tolist())
    whole = attack([observe(sent, images, labels)])
    torch.testing.assert_close(found.images, whole.images, atol=1e-3, rtol=0)
    assert psnr(found, images[4:5]) > 60


def test_the_labels_of_a_batch_are_counted() -> None:
    _, found = answer_to(ATTACKS.get("fishing")(target=6), micro(), photographs(32, 5), LABELS, [])
    assert found.labels.tolist() == sorted(LABELS.tolist())
    assert found.details["senders"] == 1
    assert found.details["classes"] == 4


@pytest.mark.parametrize("images", [1, 5])
def test_nobody_bites_for_a_class_that_no_one_holds(images: int) -> None:
    view, found = answer_to(ATTACKS.get("fishing")(target=9), micro(), photographs(32, images), LABELS[:images], [])
    assert found.images is None
    assert found.diagnosis.startswith("no image of class 9 is in the batch, so that no image sends a gradient")
    assert float(view.gradients["patch_embed.proj.weight"].abs().max()) == 0


def test_several_images_of_a_class_are_not_vouched_for() -> None:
    _, found = answer_to(ATTACKS.get("fishing")(target=3), micro(), photographs(32, 5), LABELS, [])
    assert "2 images of class 3 send their gradients together" in found.diagnosis
    assert not found.known.any()


def test_another_batch_is_noticed() -> None:
    attack, images, history = ATTACKS.get("feature_fishing")(), photographs(32, 8), []
    labels = torch.tensor([1, 1, 0, 5, 1, 0, 3, 8])
    answer_to(attack, micro(), images[:4], labels[:4], history)
    answer_to(attack, micro(), images[:4], labels[:4], history)
    _, found = answer_to(attack, micro(), images[4:], labels[4:], history)
    assert found.diagnosis.startswith("the classes of the client's batch changed between the prepared rounds")
    assert found.known is None or not found.known.any()


def test_a_localisation_loss_that_cannot_be_silenced_is_noticed() -> None:
    built = build_model("vit_mini_64_mjp", num_classes=200, weights="auto", dal="pca")
    attack, images = ATTACKS.get("fishing")(target=5), photographs(64, 4)
    mask = torch.rand(4, 64, generator=torch.Generator().manual_seed(0)) < 0.1
    sent = model_as_sent(built.module, attack.send(before(built.module, (3, 64, 64))).parameters)
    found = attack([with_localisation(replace(built, module=sent), images, LABELS[:4], mask)])
    assert "no row of the position gradient is zero" in found.diagnosis
    assert not found.known.any()


def test_thresholds_under_masks_drawn_anew_are_not_vouched_for() -> None:
    built, images, attack = micro("auto", "vit_mini_64_mjp"), photographs(64, 4), ATTACKS.get("feature_fishing")()
    history, generator = list[Observation](), torch.Generator().manual_seed(0)
    found = []
    for _ in range(5):
        sent = model_as_sent(built.module, attack.send(before(built.module, (3, 64, 64), history)).parameters)
        mask = torch.rand(4, 64, generator=generator) < 0.1
        view = with_localisation(replace(built, module=sent), images, LABELS[:4], mask)
        found.append(attack([*history, view]))
        history.append(remember(view, attack.remembered_layers(sent, (3, 64, 64))))
    assert any(one.images is not None for one in found)
    assert all("the client hides positions" in one.diagnosis for one in found)
    assert not any(one.known.any() for one in found if one.known is not None)


def test_a_reader_may_vouch_for_nothing(monkeypatch) -> None:
    """Its answer then has images and no mask of what it knows."""
    whole = ClassifierAttack.read_alone
    monkeypatch.setattr(ClassifierAttack, "read_alone", lambda *given: replace(whole(*given), known=None))
    attack, images, history = ATTACKS.get("feature_fishing")(target=3), photographs(32, 1), []
    found = [answer_to(attack, micro(), images, LABELS[:1], history)[1] for _ in range(2)][-1]
    assert found.images.shape == images.shape
    assert found.known is None


def test_other_weights_below_the_classifier_are_noticed() -> None:
    attack, images, history = ATTACKS.get("feature_fishing")(), photographs(32, 4), []
    for seed in (0, 0, 1):
        built = build_model("vit_micro_32", num_classes=10, weights="random", seed=seed)
        found = answer_to(attack, built, images, LABELS[:4], history)[1]
    assert "the layers below the classifier changed" in found.diagnosis


@pytest.mark.parametrize("name", ["fishing", "feature_fishing"])
def test_an_honest_model_was_not_prepared(name: str) -> None:
    view = observe(micro(), photographs(32, 1))
    attack = ATTACKS.get(name)()
    assert "not prepared" in attack([view]).diagnosis
    assert "not prepared" in attack.obstacle([view])


@pytest.mark.parametrize("name", ["fishing", "feature_fishing"])
def test_what_is_not_granted_is_refused(name: str) -> None:
    attack = ATTACKS.get(name)()
    attack.require(ThreatModel(GRANTED), name)
    with pytest.raises(UsageError, match="needs active_parameters, which the threat model does not grant"):
        attack.require(ThreatModel(), name)


@pytest.mark.parametrize(("name", "message"), [("fishing", "lie in 0..9"), ("feature_fishing", "lie in 0..9")])
def test_a_class_that_the_model_lacks_is_refused(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ATTACKS.get(name)(target=10).send(before(micro(), (3, 32, 32)))


def test_an_unknown_reader_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'unmix'"):
        ATTACKS.get("fishing")(reader="unmixx")


@pytest.mark.parametrize("make", [timm_vit, torchvision_vit])
def test_classifiers_of_other_libraries_are_set(make) -> None:
    model = make().eval()
    prepared = ATTACKS.get("fishing")(target=2).send(before(model, (3, 32, 32))).parameters
    weight, bias = prepared.values()
    assert weight.abs().amax(dim=1).nonzero().flatten().tolist() == [2]
    assert bias.argmin() == 2
    assert set(prepared) < set(dict(model.named_parameters()))


def test_classes_held_once_are_fished_for_first() -> None:
    def head(row: int) -> SetHead:
        return SetHead("head", row, torch.ones(2), torch.zeros(5))

    assert next_class([], 5) == 0
    assert next_class([(head(0), torch.tensor([0, 2, 0, 1, 1]))], 5) == 3
    assert next_class([(head(3), torch.tensor([0, 2, 0, 1, 0]))], 5) == 1
    assert next_class([(head(0), torch.tensor([0, 0, 0, 0, 0]))], 5) == 1
    assert next_class([(head(row), torch.zeros(5).long()) for row in range(5)], 5) == 0


def test_thresholds_lie_below_and_above_all_features_and_then_between() -> None:
    low, high = Probe(-1e4, 3.0, 6.0, None), Probe(1e4, -1.0, -1.0, None)
    assert next_threshold([]) == -1e4
    assert next_threshold([low]) == 1e4
    assert next_threshold([low, high]) == pytest.approx(7 / 4)
    middle = Probe(1.75, 1.0, 4.5, None)  # two images on each side; those below are halved first
    assert next_threshold([low, middle, high]) == pytest.approx(0.75)
    # Where a threshold fell onto an image, the others come first, and then it goes to both sides of the mean.
    assert next_threshold([low, middle, high], [0.75]) == pytest.approx(2.75)
    assert next_threshold([low, middle, high], [0.75, 2.75]) == pytest.approx(0.75 - 2e-4)
    assert next_threshold([low, middle, high], [0.75, 2.75, 2.7, 0.7498]) == pytest.approx(0.75 + 2e-4)
