"""Input that is wrong says so in one line; what can be put right is put right and named."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from attacks import ATTACKS, UsageError
from fedmjp.audit import audit_gradient
from fedmjp.audit.answer import Audit
from fedmjp.audit.guesses import embedded_guesses
from fedmjp.audit.verdict import Answer
from tests.attacks.models import timm_vit
from tests.audit.test_user_model import gradients_of
from tests.conftest import photographs

SIXTY_FOUR = {"model_name": "vit_tiny_patch16_224", "img_size": 64, "patch_size": 8, "embed_dim": 48, "depth": 2}
SIXTY_FOUR |= {"num_heads": 2, "num_classes": 5}
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@pytest.fixture(scope="module")
def step() -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    """A model, an image and the gradient that a client would send, without normalisation."""
    torch.manual_seed(0)
    model, images = timm_vit(), photographs(32, 1)
    return model, images, gradients_of(model, images, [1])


def audited(step, **changes) -> Audit:
    model, images, gradients = step
    given = {"model": model, "images": images, "gradients": gradients, "attacks": ("patch_embedding",)} | changes
    return audit_gradient(given.pop("model"), given.pop("images"), given.pop("gradients"), **given)


def findings(audit: Audit) -> dict[str, str]:
    return {finding.name: finding.sentence for finding in audit.findings if finding.name != "guesses"}


def test_input_that_fits_raises_no_finding(step) -> None:
    audit = audited(step, labels=torch.tensor([1]))
    assert findings(audit) == {}
    assert audit.verdict.answer is Answer.LEAKS


def with_nan(images: Tensor) -> Tensor:
    changed = images.clone()
    changed[0, 0, 0, 0] = float("nan")
    return changed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda images: images.numpy(), "must be a tensor"),
        (lambda images: images[0], r"not \(3, 32, 32\); add the batch dimension"),
        (lambda images: images[:0], "must have the shape"),
        (lambda images: (images * 255).byte(), "divide by 255"),
        (lambda images: images * 255, "divide by 255"),
        (lambda images: (images - 0.5) / 0.5, "pass the images before normalisation"),
        (with_nan, "NaN or infinity"),
        (lambda images: images[..., :30], "do not divide into patches of 8"),
        (lambda images: images.repeat(1, 1, 2, 2)[..., :16, :], "cannot be run on images of shape"),
    ],
)
def test_wrong_images(step, change, words: str) -> None:
    with pytest.raises(UsageError, match=words) as error:
        audited(step, images=change(step[1]))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mean": (0.5, 0.5)}, "mean must be 3 finite numbers"),
        ({"mean": 0.5}, "mean must be one number a channel"),
        ({"std": (0.5, 0.0, 0.5)}, "std must be positive"),
        ({"std": (0.5, float("nan"), 0.5)}, "std must be 3 finite numbers"),
        ({"labels": torch.tensor([1, 2])}, "labels must be 1 whole numbers"),
        ({"labels": torch.tensor([0.5])}, "labels must be 1 whole numbers"),
        ({"labels": torch.tensor([-1])}, "labels must not be negative, and the least is -1"),
        ({"labels": torch.tensor([77])}, r"classes do not hold the labels \[77\]"),
        ({"mean": torch.tensor([0.5, 0.5])}, "mean must be 3 finite numbers"),
        ({"model": "vit_b_16"}, "model must be a torch.nn.Module"),
    ],
)
def test_wrong_arguments(step, change, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        audited(step, **change)


def test_a_normalisation_may_be_an_array(step) -> None:
    found = audited(step, mean=np.array([0.5] * 3), std=torch.tensor([0.5] * 3))
    assert found.verdict.answer is audited(step, mean=(0.5,) * 3, std=(0.5,) * 3).verdict.answer


def test_half_precision_rounds_no_original(step) -> None:
    found = audited(step, gradients={name: g.bfloat16() for name, g in step[2].items()})
    assert torch.equal(found.originals, step[1].to(found.originals.dtype))
    assert found.originals.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_gradients_of_another_type_are_matched(step, dtype: torch.dtype) -> None:
    gradients = {name: g.to(dtype) for name, g in step[2].items()}
    found = audited(step, gradients=gradients, attacks=(ATTACKS.get("inverting_gradients")(steps=1),))
    assert found.diagnoses == {}


def replaced(name: str, value):
    return lambda gradients: gradients | {name: value}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda gradients: list(gradients.values()), "must be a dictionary"),
        (lambda gradients: {}, "gradients is empty"),
        (lambda gradients: dict.fromkeys(gradients), "all gradients are None"),
        (lambda gradients: {f"{n}.grad": g for n, g in gradients.items()}, "'cls_token.grad' is not, 'cls_token' is"),
        (replaced("head.bias", torch.zeros(7)), r"shape \(7,\), the parameter \(5,\)"),
        (replaced("head.bias", torch.full((5,), torch.inf)), "head.bias holds NaN or infinity"),
        (replaced("head.bias", torch.ones(5, dtype=torch.bool)), "pass floating-point numbers"),
        (replaced("head.bias", torch.ones(5, dtype=torch.int64)), "head.bias is of type torch.int64: pass floating"),
        (replaced("head.bias", "text"), "head.bias"),
    ],
)
def test_wrong_gradients(step, change, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        audited(step, gradients=change(step[2]))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_prefixes_of_wrappers_are_removed(step, prefix: str) -> None:
    audit = audited(step, gradients={prefix + n: g for n, g in step[2].items()})
    assert list(findings(audit)) == ["prefixed_names"]
    assert audit.verdict.certified == 1


def test_the_model_inside_a_wrapper_is_attacked(step) -> None:
    model, images, gradients = step
    audit = audit_gradient(nn.DataParallel(model), images, gradients, attacks=("patch_embedding",))
    assert findings(audit) == {"wrapped_model": "the model inside DataParallel was attacked"}


def test_arrays_none_and_foreign_names(step) -> None:
    gradients = {n: g.numpy() for n, g in step[2].items()}
    audit = audited(step, gradients=gradients | {"head.bias": None, "step": 3})
    found = findings(audit)
    assert list(found) == ["converted", "unknown_names", "missing_gradients", "not_reproduced"]
    assert "could not be checked" in found["not_reproduced"]  # without head.bias the label is not known
    assert "no parameters of the model: step" in found["unknown_names"]
    assert "no gradient of head.bias" in found["missing_gradients"]
    assert audit.table.set_index("attack").loc["patch_embedding", "psnr"] > 50


def test_a_partial_update_names_the_layer_in_the_diagnosis(step) -> None:
    gradients = {n: g for n, g in step[2].items() if n != "pos_embed"}
    audit = audited(step, gradients=gradients)
    assert "no gradient of pos_embed" in audit.diagnoses["patch_embedding"]
    assert audit.verdict.answer is Answer.NOT_TESTED


@pytest.mark.parametrize(("given", "labels"), [({}, None), ({}, torch.tensor([1])), (IMAGENET, None)])
def test_another_normalisation_than_the_clients(step, given: dict, labels) -> None:
    model, images, _ = step
    gradients = gradients_of(model, images, [1], std=0.5)
    audit = audited(step, gradients=gradients, labels=labels, **given)
    assert "mean (0.5, 0.5, 0.5) and std (0.5, 0.5, 0.5) do: pass those" in findings(audit)["normalisation"]
    assert "pass those" in audit.diagnoses["patch_embedding"]
    assert audit.verdict.answer is not Answer.NOT_SHOWN
    fitting = audited(step, gradients=gradients, mean=[0.5] * 3, std=[0.5] * 3)
    assert findings(fitting) == {}


def with_noise(gradients: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """The update with noise of a share of its rms on every entry."""
    entries = torch.cat([g.flatten() for g in gradients.values()])
    level, drawn = share * float(entries.square().mean().sqrt()), torch.Generator().manual_seed(0)
    return {n: g + level * torch.randn(g.shape, generator=drawn) for n, g in gradients.items()}


def in_bfloat16(gradients: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    return {n: g.bfloat16().float() for n, g in gradients.items()}


@pytest.mark.parametrize(("change", "share"), [(with_noise, 1e-3), (with_noise, 1e-2), (in_bfloat16, 0.0)])
def test_noise_and_rounding_do_not_excuse_another_normalisation(step, change, share: float) -> None:
    model, images, _ = step
    for std, name in ((0.5, "normalisation"), (0.4, "not_reproduced")):  # a common one, and another
        gradients = change(gradients_of(model, images, [1], std=std), share)
        forgotten = audited(step, gradients=gradients)
        assert name in findings(forgotten)
        assert forgotten.verdict.answer is not Answer.NOT_SHOWN
        fitting = findings(audited(step, gradients=gradients, mean=[std] * 3, std=[std] * 3))
        assert set(fitting) <= {"noise", "precision"}, fitting


def test_a_frozen_copy_of_the_model_is_audited_as_the_client_trained_it() -> None:
    """More tokens than channels, where only the position rows say enough."""
    torch.manual_seed(0)
    model, images = timm.create_model(**SIXTY_FOUR), photographs(64, 1)
    gradients = gradients_of(model, images, [1])
    frozen = copy.deepcopy(model).requires_grad_(False)
    live, other = (audit_gradient(m, images, gradients, attacks=("patch_embedding",)) for m in (model, frozen))
    assert other.verdict.headline() == live.verdict.headline()
    assert live.verdict.answer is Answer.LEAKS
    assert not any(p.requires_grad for p in frozen.parameters())


def test_an_uncommon_normalisation_is_measured(step) -> None:
    model, images, _ = step
    audit = audited(step, gradients=gradients_of(model, images, [1], std=0.4))
    assert "check mean and std" in findings(audit)["not_reproduced"]
    assert "differs from the one given by" in audit.diagnoses["patch_embedding"]


def test_a_batch_is_checked_with_its_labels(step) -> None:
    model, images = step[0], photographs(32, 5)
    gradients = gradients_of(model, images, [0, 1, 2, 3, 4], std=0.4)
    labels = torch.arange(5)
    assert "not_reproduced" in findings(audited(step, images=images, gradients=gradients, labels=labels))
    fitting = audited(step, images=images, gradients=gradients, labels=labels, mean=[0.4] * 3, std=[0.4] * 3)
    assert findings(fitting) == {}


def test_a_summed_loss_is_no_hindrance(step) -> None:
    audit = audited(step, gradients={n: 1024 * g for n, g in step[2].items()})
    assert "is 1024 times that of the mean cross-entropy" in findings(audit)["scaled_loss"]
    assert audit.table.set_index("attack").loc["patch_embedding", "psnr"] > 50


def test_dropout_cannot_be_repeated(step) -> None:
    model, images, gradients = step
    twin = timm_vit(proj_drop_rate=0.1)
    twin.load_state_dict(model.state_dict())
    audit = audited(step, model=twin.train(), gradients=gradients)
    assert "training mode with dropout" in findings(audit)["not_reproduced"]


def test_a_batch_that_repeats_images(step) -> None:
    model, images = step[0], photographs(32, 2)[[0, 1, 0]]
    audit = audited(step, images=images, gradients=gradients_of(model, images, [0, 1, 0]))
    assert "the batch of 3 holds 2 different images" in findings(audit)["repeated_images"]


def test_what_hinders_is_in_the_diagnosis(step) -> None:
    audit = audited(step, gradients={n: g.sign() for n, g in step[2].items()})
    assert "first step of Adam" in audit.diagnoses["patch_embedding"]
    assert audit.verdict.answer is Answer.NOT_TESTED
    assert not audit.table["known"].any()


def test_weight_decay_is_subtracted(step) -> None:
    weights = dict(step[0].named_parameters())
    audit = audited(step, gradients={n: g + 0.05 * weights[n].detach() for n, g in step[2].items()})
    assert "times 0.05 (weight decay); they were known and were subtracted" in findings(audit)["weight_decay"]
    assert audit.table.set_index("attack").loc["patch_embedding", "psnr"] > 40


@pytest.mark.parametrize("shape", [(1, 3, 24, 40), (2, 1, 16, 16)])
def test_guesses_for_images_of_any_shape(shape: tuple[int, ...]) -> None:
    guesses = embedded_guesses(torch.rand(shape))
    assert all(guess.shape == shape for guess in guesses.values())
    assert embedded_guesses(torch.rand(1, 4, 8, 8)) == {}


def test_another_image_is_another_one() -> None:
    from fedmjp.data import load_data

    images = load_data("photos", size=32).test.images([0, 1, 2])
    guesses = embedded_guesses(images)
    assert not torch.isclose(guesses["other_image"], images).flatten(1).all(dim=1).any()


def test_a_copy_of_the_image_is_no_guess() -> None:
    from fedmjp.audit.guesses import without_copies
    from fedmjp.data import load_data

    images = load_data("photos", size=32).test.images([0, 1, 2])
    others = images[[1, 1, 0]]  # the second is the image itself
    found = without_copies(others, images)
    assert torch.equal(found[[0, 2]], others[[0, 2]])
    assert (found[1] - images[1]).square().mean() > 1e-3
    with pytest.raises(UsageError, match="pass at least two that differ"):
        without_copies(torch.zeros(1, 4, 8, 8), torch.zeros(1, 4, 8, 8))


def test_the_guesses_of_a_federation_with_one_training_image_are_not_that_image() -> None:
    from types import SimpleNamespace

    from fedmjp.audit.originals import Originals
    from fedmjp.data import load_data

    data = load_data("photos", size=32)
    one = data.train.subset([0])
    task = SimpleNamespace(data=SimpleNamespace(train=one, test=data.test), device=torch.device("cpu"))
    found = Originals(task, simulated=True)
    assert found.single
    assert (found.mean_image - one.images([0])).square().mean() > 1e-2
    task.data.train = data.train.subset([0, 1])
    assert not Originals(task, simulated=True).single
    task.data.train, images = data.train.subset([0, 0, 0]), data.train.images([0, 0])  # copies of one image
    guesses = Originals(task, simulated=True).guesses(SimpleNamespace(round=1, client=0), images)
    assert all((guess - images).square().mean() > 1e-2 for guess in guesses.values())


@pytest.mark.parametrize("spoilt", ["no bias", "float16"])
def test_other_images_are_noticed_where_less_was_sent(step, spoilt: str) -> None:
    gradients = {n: g for n, g in step[2].items() if spoilt != "no bias" or n != "head.bias"}
    if spoilt == "float16":
        gradients = {n: g.half().float() for n, g in gradients.items()}
    audit = audited(step, images=1 - step[1].flip(-1), gradients=gradients)
    assert "not_reproduced" in findings(audit) or audit.verdict.certified  # the update is of the image that was found
    assert audit.verdict.answer is not Answer.NOT_SHOWN
