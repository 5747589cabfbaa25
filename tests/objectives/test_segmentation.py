"""Segmentation: labels that move with their pixels, losses and scores against slow oracles, one-line mistakes."""

from __future__ import annotations

import dataclasses
import math
import sys

import numpy as np
import pytest
import torch

from attacks.registry import UsageError
from fedmjp import probe as probe_command
from fedmjp import simulate as simulate_command
from fedmjp import train as train_command
from fedmjp.config import DataConfig, ModelConfig
from fedmjp.data import load_data
from fedmjp.data.labelmaps import IGNORED, LabelMapSet
from fedmjp.defenses import DEFENSES
from fedmjp.errors import MissingExtra
from fedmjp.evaluation.segmentation import Confusion, pixel_loss
from fedmjp.models import build_model
from fedmjp.objectives import Draws, Learner, read_objective
from fedmjp.objectives.segmentation import moved_labels
from fedmjp.training.batches import Batches
from fedmjp.training.config import default_config
from fedmjp.training.trainer import Trainer

pytest.importorskip("segmentation_models_pytorch", reason="the extra segmentation is not installed")
CPU = torch.device("cpu")


def learner(model: str, defense=None) -> Learner:
    return Learner.build(
        read_objective("segmentation:width=16"),
        defense or DEFENSES.get("none")(),
        ModelConfig(model, "random"),
        num_classes=8,
        seed=0,
        device=CPU,
    )


def draws() -> Draws:
    return Draws(torch.Generator().manual_seed(0), torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "options", "moves"),
    [
        ("none", {}, False),
        ("noise", {}, False),
        ("frozen_positions", {}, False),
        ("mjp", {"gamma": 0.5}, True),
        ("mjp", {"gamma": 0.5, "positions": "own", "jigsaw_per": "batch"}, True),
        ("mjp", {"jigsaw_probability": 0.0}, False),
        ("spp", {"spp_probability": 1.0}, True),
    ],
)
def test_labels_move_with_their_pixels(name, options, moves) -> None:
    """The first channel of the image is the label map: after the defence it still is."""
    labels = torch.randint(0, 8, (3, 32, 32), generator=torch.Generator().manual_seed(4))
    labels[:, 5] = IGNORED
    images = (labels[:, None] / 255).expand(-1, 3, -1, -1).contiguous()
    model = build_model("vit_micro_32_mjp", num_classes=8, weights="random")
    seen = DEFENSES.get(name)(**options).on_input(images, model, torch.Generator().manual_seed(0), 1)
    moved = moved_labels(labels, seen)
    assert torch.equal((seen.images[:, 0] * 255).round().long(), moved)
    assert moved.dtype == torch.int64
    assert torch.equal(moved, labels) != moves


def test_loss_equals_a_sum_over_pixels() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 4, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 5, (2, 4, 3), generator=generator)
    labels[0, :2] = IGNORED
    total, count = 0.0, 0
    for b in range(2):
        for y in range(4):
            for x in range(3):
                if labels[b, y, x] != IGNORED:
                    scores = [math.exp(v) for v in logits[b, :, y, x].tolist()]
                    total -= math.log(scores[int(labels[b, y, x])] / sum(scores))
                    count += 1
    assert float(pixel_loss(logits, labels)) == pytest.approx(total / count, rel=1e-12)
    assert float(pixel_loss(logits, torch.full_like(labels, IGNORED))) == 0


def test_scores_count_over_the_whole_test_set() -> None:
    """Against sets of pixels in plain Python: IoU and accuracy by class, classes that never occur left out."""
    rng = np.random.default_rng(0)
    found, labels = rng.integers(0, 4, (2, 3, 6, 6))
    labels[0, :3] = IGNORED
    confusion = Confusion(6, CPU)
    for k in range(3):
        confusion.add(torch.from_numpy(found[k : k + 1]), torch.from_numpy(labels[k : k + 1]))
    result = confusion.result(0.5)
    kept = labels != IGNORED
    ious, accuracies = [], []
    for k in range(4):
        own, said = kept & (labels == k), kept & (found == k)
        ious.append((own & said).sum() / (own | said).sum())
        accuracies.append((own & said).sum() / own.sum())
    assert result.miou == pytest.approx(np.mean(ious), abs=1e-6)
    assert result.macc == pytest.approx(np.mean(accuracies), abs=1e-6)
    assert result.iou[:4] == pytest.approx(ious, abs=1e-6)
    assert result.loss == 0.5


@pytest.mark.parametrize("name", ["vit_micro_32", "vit_mini_64_nope", "swin_micro_32", "resnet_micro_32"])
def test_every_parameter_has_a_gradient(name) -> None:
    """The classifier is gone, and nothing is sent that the loss does not depend on."""
    own = learner(name)
    size = own.model.image_size
    images, labels = torch.rand(2, 3, size, size), torch.randint(0, 8, (2, size, size))
    own.loss(own.views(images, draws(), 1), labels, draws()).backward()
    without = [n for n, p in own.model.module.named_parameters() if p.grad is None]
    assert without == []
    assert not any(n.startswith(("head.", "fc.")) for n, _ in own.model.module.named_parameters())


def test_hidden_positions_reach_the_encoder() -> None:
    own = learner("vit_micro_32", DEFENSES.get("mjp")(gamma=0.5, dal="none"))
    images, labels = torch.rand(2, 3, 32, 32), torch.randint(0, 8, (2, 32, 32))
    own.loss(own.views(images, draws(), 1), labels, draws()).backward()
    rows = own.model.module.pos_embed.grad[0, 1:]
    assert own.model.module.unk_embed.grad.any()
    (seen,) = own.views(images, draws(), 1)
    hidden = seen.position_mask.all(dim=0)
    assert not rows[hidden].any()
    assert rows[~hidden].abs().sum(dim=1).all()


def test_crops_and_flips_take_the_labels_along(monkeypatch) -> None:
    bundle = load_data("mosaics", size=32, train_limit=8)
    labels = bundle.train.targets(range(8))
    recipe = dataclasses.replace(default_config("segmentation").recipe, batch_size=8)
    model = build_model("vit_micro_32", num_classes=8, weights="random")
    batches = Batches(bundle.train, recipe, model, seed=0)
    # The image is the label map itself: what the crop does to one must be what it does to the other.
    dataset = batches.loader.dataset
    pictures = (labels[..., None].expand(-1, -1, -1, 3) * 30).byte().numpy()
    monkeypatch.setattr(dataset.images, "pixels", pictures.__getitem__)
    for images, moved in batches.epoch(1, CPU):
        agrees = (images[:, 0] * 255 / 30).round() == moved
        assert agrees.float().mean() > 0.8  # bicubic pixels on a border belong to neither side
        assert not torch.equal(moved.sort(dim=0).values, labels.sort(dim=0).values)
        assert moved.dtype == torch.int64


@pytest.mark.long
def test_segmentation_is_learned(tmp_path) -> None:
    """Two epochs of mosaics beat the classes' shares by far."""
    config = default_config("segmentation:width=32")
    recipe = dataclasses.replace(config.recipe, epochs=3, learning_rate=0.04, warmup_epochs=0.5)
    data = DataConfig("mosaics", None, 512, 64)
    trainer = Trainer(
        dataclasses.replace(config, model=ModelConfig("swin_micro_32", "random"), data=data, recipe=recipe)
    )
    scores = [trainer.epoch(number, lambda loss: None)["test_accuracy"] for number in (1, 2, 3)]
    assert scores[-1] > 0.15  # one class everywhere gives 1/8 of 1/8


def test_without_its_extra_the_message_names_it(monkeypatch) -> None:
    for name in list(sys.modules):
        if name.startswith("segmentation_models_pytorch"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)
    with pytest.raises(MissingExtra, match=r"pip install 'fedmjp\[segmentation\]'"):
        learner("vit_micro_32")


SEGMENT = ["--objective", "segmentation", "--model", "vit_micro_32"]


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        (train_command, [*SEGMENT, "--data", "photos"], "needs images with a class a pixel"),
        (train_command, ["--data", "mosaics"], "--objective supervised needs images with a class each"),
        (train_command, [*SEGMENT, "--data", "mosaics", "--mixup", "0.2"], "not mixed or smoothed; pass --mixup 0"),
        (train_command, [*SEGMENT, "--data", "mosaics", "--rand-augment", "rand-m9"], "--rand-augment would move"),
        (train_command, ["--objective", "segmentation:width=0", "--data", "mosaics"], "width of objective"),
        (simulate_command, [*SEGMENT, "--data", "mosaics"], "has no federation here; train it with fedmjp.train"),
        (simulate_command, ["--data", "mosaics"], "a federation needs images with a class each"),
    ],
)
def test_mistakes_are_one_line(command, options, words, tmp_path, capsys) -> None:
    assert command.main([*options, "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err.strip()
    assert words in printed
    assert "\n" not in printed


def test_the_card_names_the_score(tmp_path) -> None:
    options = [*SEGMENT, "--data", "mosaics", "--train-limit", "16", "--test-limit", "8", "--epochs", "1"]
    options += ["--warmup-epochs", "0", "--smallest-crop", "0.5", "--defense", "mjp", "--out", str(tmp_path / "out")]
    assert train_command.main(options) == 0
    card = (tmp_path / "out" / "model.md").read_text()
    assert "| mean IoU of this file |" in card
    assert "of pixels in 8 test images" in card


def test_more_classes_than_a_map_can_hold_are_refused() -> None:
    with pytest.raises(UsageError, match="256 classes do not fit into 8-bit label maps"):
        LabelMapSet(None, None, [], [str(k) for k in range(256)], 8)


def test_a_segmentation_encoder_can_be_probed(tmp_path, capsys) -> None:
    options = [*SEGMENT, "--data", "mosaics", "--train-limit", "16", "--test-limit", "8", "--epochs", "1"]
    assert train_command.main([*options, "--warmup-epochs", "0", "--out", str(tmp_path / "out")]) == 0
    checkpoint = ["--checkpoint", str(tmp_path / "out" / "model.safetensors")]
    assert probe_command.main([*checkpoint, "--train-limit", "24", "--test-limit", "8", "--neighbours", "1"]) == 0
    assert "linear probe" in capsys.readouterr().out
    assert probe_command.main([*checkpoint, "--data", "mosaics"]) == 2
    assert "the encoder of a vit_micro_32 needs images with a class each" in capsys.readouterr().err
