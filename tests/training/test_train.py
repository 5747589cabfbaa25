"""Central training from the command line: identical results after resuming, one-line errors, loadable weights."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from attacks import UsageError
from fedmjp import train as command
from fedmjp.config import DataConfig, ModelConfig
from fedmjp.evaluation.accuracy import evaluate
from fedmjp.models import build_model
from fedmjp.models.weights import read_state
from fedmjp.objectives import Draws, client_loss
from fedmjp.training import Recipe, TrainConfig, train
from fedmjp.training.batches import Batches
from fedmjp.training.config import StartConfig
from fedmjp.training.folder import TrainingFolder
from fedmjp.training.trainer import Trainer
from tests.conftest import interrupted_at

QUIET = Console(quiet=True)
SMALL = ["--data", "photos", "--train-limit", "24", "--model", "vit_mini_32", "--batch-size", "8"]


def config(out, **changes) -> TrainConfig:
    """Three epochs of six steps with every option enabled that uses random numbers."""
    recipe = Recipe(**({"epochs": 3, "batch_size": 8, "warmup_epochs": 1, "learning_rate": 0.03} | changes))
    data = DataConfig(data="photos", train_limit=24, test_limit=8)
    return TrainConfig(
        defense="mjp", model=ModelConfig("vit_mini_32", "random"), data=data, recipe=recipe, threads=1, out=out
    )


def run(*options: str) -> int:
    """Exit code of the command line, in this process."""
    try:
        return command.main([*SMALL, *options])
    except SystemExit as stop:  # the parser of the command line leaves this way
        return int(stop.code)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> TrainConfig:
    """An uninterrupted training."""
    options = config(tmp_path_factory.mktemp("train") / "whole")
    train(options, QUIET)
    return options


def test_a_resumed_training_equals_an_uninterrupted_one(whole, undrawn, tmp_path) -> None:
    options = config(tmp_path / "broken")
    with interrupted_at(Trainer, "step", 6), pytest.raises(KeyboardInterrupt):  # in the middle of the second epoch
        train(options, QUIET)
    assert len(pd.read_csv(options.out / "history.csv")) == 1
    train(TrainConfig(**(vars(options) | {"resume": True})), QUIET)
    ended, expected = (TrainingFolder(TrainConfig(**(vars(o) | {"resume": True}))).load() for o in (options, whole))
    for part in ("model", "optimizer"):
        _assert_same(ended[0][part], expected[0][part])
    timeless = [{k: v for k, v in line.items() if "second" not in k} for line in ended[1]]
    assert timeless == [{k: v for k, v in line.items() if "second" not in k} for line in expected[1]]
    assert (options.out / "model.safetensors").read_bytes() == (whole.out / "model.safetensors").read_bytes()
    written = (options.out / "history.csv").read_text()
    (options.out / "history.csv").write_text(written.splitlines()[0])  # a crash before it was written
    train(TrainConfig(**(vars(options) | {"resume": True})), QUIET)
    assert (options.out / "history.csv").read_text() == written


def _assert_same(ours, theirs) -> None:
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs)
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            _assert_same(ours[key], theirs[key])
    elif isinstance(ours, list):
        for mine, other in zip(ours, theirs, strict=True):
            _assert_same(mine, other)
    else:
        assert ours == theirs


def test_the_folder_holds_the_documented_files(whole) -> None:
    names = {p.name for p in whole.out.iterdir()}
    assert names == {
        *("run.json", "state.pt", "history.csv", "history.png", "history.pdf"),
        *("model.safetensors", "model.md"),
    }
    history = pd.read_csv(whole.out / "history.csv")
    assert history["epoch"].tolist() == [1, 2, 3]
    assert (history["steps"] == 3).all()
    assert all(t.dtype == torch.float16 for t in load_file(whole.out / "model.safetensors").values())
    card = (whole.out / "model.md").read_text()
    built = build_model("vit_mini_32_mjp", num_classes=8, weights=str(whole.out / "model.safetensors"), dal="nonlinear")
    assert built.provenance == "model.safetensors"
    test = Trainer(whole).data.test
    accuracy = evaluate(built, test, torch.device("cpu"))[1]
    assert f"{accuracy:.1%} of 8 test images" in card
    assert "gamma 0.9" in card


@pytest.mark.parametrize("part", ["weights", "name", "digest", "objective"])
def test_weights_with_a_flipped_bit_are_refused(whole, tmp_path, part: str) -> None:
    content = bytearray((whole.out / "model.safetensors").read_bytes())
    assert read_state(whole.out / "model.safetensors")
    places = {"weights": -9, "name": content.index(b"pos_embed"), "digest": content.index(b"sha256") + 20}
    places["objective"] = content.index(b"supervised")
    content[places[part]] ^= 1
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"model.safetensors is damaged: its weights are not as they were written"):
        read_state(path)


def test_a_step_equals_a_clients_step(tmp_path) -> None:
    """With plain labels and images, one step's loss and gradient equal those of a client."""
    trainer = Trainer(dataclasses.replace(config(tmp_path, clip_gradient=0.0), precision="float32"))
    client = build_model("vit_mini_32_mjp", num_classes=8, weights="random", dal="nonlinear")
    images, labels = trainer.data.train.images(range(8)), trainer.data.train.labels[:8]
    seen = trainer.defense.on_input(images, client, torch.Generator().manual_seed(3), 1)
    loss = client_loss(client, seen.images, labels, seen.position_mask, trainer.defense.loss_weights())
    loss.backward()
    one_hot = torch.nn.functional.one_hot(labels, 8).float()
    draws = Draws.seeded(3, 4)
    ours = trainer.step(images, one_hot, draws, 1)
    assert ours == pytest.approx(float(loss.detach()), rel=1e-5)
    theirs = dict(client.module.named_parameters())
    for name, parameter in trainer.model.module.named_parameters():
        assert torch.allclose(parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-5), name


@pytest.mark.parametrize(
    ("precision", "device", "cpu", "taken"),
    [
        ("auto", "cpu", True, "bfloat16"),
        ("auto", "cpu", False, "float32"),
        ("auto", "cuda:0", False, "bfloat16"),
        ("float32", "cpu", True, "float32"),
        ("bfloat16", "cpu", False, "bfloat16"),
    ],
)
def test_auto_precision_follows_the_machine_and_is_recorded(precision, device, cpu, taken, tmp_path, monkeypatch):
    monkeypatch.setattr("fedmjp.training.config.cpu_has_bfloat16", lambda: cpu)
    options = dataclasses.replace(config(tmp_path), precision=precision, device=device)
    assert options.activations() == options.identity()["precision"] == taken


def test_bfloat16_multiplies_in_bfloat16_and_keeps_float32_weights(tmp_path) -> None:
    trainer = Trainer(dataclasses.replace(config(tmp_path), precision="bfloat16"))
    seen = []
    trainer.model.module.blocks[0].attn.qkv.register_forward_hook(lambda module, inputs, output: seen.append(output))
    images, labels = trainer.data.train.images(range(8)), torch.full((8, 8), 1 / 8)
    trainer.step(images, labels, Draws.seeded(3, 4), 1)
    assert seen[0].dtype == torch.bfloat16
    assert {p.dtype for p in trainer.model.module.parameters()} == {torch.float32}


def test_muon_moves_a_matrix_equally_along_all_directions_of_its_gradient(tmp_path) -> None:
    options = config(tmp_path, optimizer="muon", weight_decay=0, warmup_epochs=0, clip_gradient=0)
    trainer = Trainer(options)
    name, rate = "blocks.0.attn.proj.weight", trainer.optimizer.param_groups[0]["lr"]
    weight = dict(trainer.model.module.named_parameters())[name]
    bias = dict(trainer.model.module.named_parameters())["blocks.0.attn.proj.bias"]
    before, before_bias = weight.detach().clone(), bias.detach().clone()
    images, labels = next(iter(trainer.batches.epoch(1, trainer.device)))
    trainer.step(images, labels, Draws.seeded(1, 2), 1)
    moved = torch.linalg.svdvals(((before - weight.detach()) / rate).double())
    expected = 0.2 * len(weight) ** 0.5  # arXiv 2502.16982, equation 4: steps with the mean square of AdamW's
    assert moved[:8].div(expected).sub(1).abs().max() < 0.2  # an image each; Newton-Schulz is not exact
    given = torch.linalg.svdvals(weight.grad.double())
    assert given[0] / given[7] > 3  # while the gradient itself is uneven
    moved_bias = ((before_bias - bias.detach()) / rate).abs()
    assert torch.allclose(moved_bias, torch.full_like(moved_bias, 1.9), atol=0.02)  # NAdamW's first step: 1 + 0.9


def test_steps_of_sgd_are_torchs(tmp_path) -> None:
    """Two steps with momentum from the gradients themselves, no Nesterov's, no decay of what is spared."""
    trainer = Trainer(config(tmp_path, optimizer="sgd", momentum=0.9, warmup_epochs=0, clip_gradient=0))
    weight, bias = trainer.model.module.head.weight, trainer.model.module.head.bias
    expected = {p: p.detach().clone() for p in (weight, bias)}
    moments, draws = {p: torch.zeros_like(p) for p in expected}, Draws.seeded(1, 2)
    for _, (images, labels) in zip(range(2), trainer.batches.epoch(1, trainer.device), strict=False):
        trainer.step(images, labels, draws, 1)
        rate = trainer.optimizer.param_groups[0]["lr"]
        for parameter, decay in ((weight, 0.05), (bias, 0.0)):
            moments[parameter] = 0.9 * moments[parameter] + parameter.grad + decay * expected[parameter]
            expected[parameter] -= rate * moments[parameter]
    for parameter, value in expected.items():
        torch.testing.assert_close(parameter.detach(), value)


def test_dropout_acts_in_training_alone(tmp_path) -> None:
    options = config(tmp_path)
    trainer = Trainer(dataclasses.replace(options, start=StartConfig(dropout=0.5)))
    module, images = trainer.model.module, trainer.data.test.images(range(2))
    module.train()
    with torch.no_grad():
        assert not torch.allclose(module(images), module(images))
        module.eval()
        assert torch.equal(module(images), module(images))
        assert torch.equal(module(images), Trainer(options).model.module.eval()(images))


@pytest.mark.parametrize(
    ("recipe", "dropout"),
    [({"optimizer": "muon"}, 0.0), pytest.param({"optimizer": "sgd", "momentum": 0.9}, 0.1, marks=pytest.mark.long)],
)
def test_a_training_by_another_optimiser_resumes(recipe, dropout: float, tmp_path) -> None:
    whole, broken = (
        dataclasses.replace(config(tmp_path / name, epochs=2, **recipe), start=StartConfig(dropout=dropout))
        for name in ("whole", "broken")
    )
    train(whole, QUIET)
    first = Trainer(broken)
    line = first.epoch(1, lambda loss: None)
    TrainingFolder(broken).save(first.state(), [line])
    train(dataclasses.replace(broken, resume=True), QUIET)
    assert (whole.out / "model.safetensors").read_bytes() == (broken.out / "model.safetensors").read_bytes()
    assert f"optimizer {recipe['optimizer']}" in (whole.out / "model.md").read_text()
    assert recipe.items() <= whole.identity()["recipe"].items()


def test_a_training_without_later_options_is_recorded_as_before(tmp_path) -> None:
    identity = config(tmp_path).identity()
    assert not {"optimizer", "momentum", "mirror", "colour"} & set(identity["recipe"])
    assert "dropout" not in identity["start"]
    assert config(tmp_path, mirror=0.0, erasing=0.5).identity()["recipe"]["mirror"] == 0


def test_training_reduces_the_loss(tmp_path, undrawn) -> None:
    light = {"mixup": 0, "cutmix": 0, "erasing": 0, "rand_augment": "none", "smallest_crop": 1.0, "repeats": 1}
    options = config(tmp_path / "out", epochs=12, **light)
    options = TrainConfig(**(vars(options) | {"defense": "none"}))
    train(options, QUIET)
    losses = pd.read_csv(options.out / "history.csv")["train_loss"]
    assert losses.iloc[-1] < 0.75 * losses.iloc[0]


def test_schedule_warms_up_and_ends_low(tmp_path) -> None:
    trainer = Trainer(config(tmp_path, epochs=4, warmup_epochs=1))
    rates = []
    for step in range(4 * len(trainer.batches)):
        trainer.schedule.step_update(step)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    peak = 0.03 * 8 / 512
    assert rates[0] == pytest.approx(0.01 * peak)
    assert max(rates) <= peak
    assert int(np.argmax(rates)) == 3  # the step after one epoch of three steps
    assert rates[-1] < 0.2 * peak


def test_position_embeddings_have_no_weight_decay(tmp_path) -> None:
    trainer = Trainer(config(tmp_path))
    spared = {id(p) for g in trainer.optimizer.param_groups if not g["weight_decay"] for p in g["params"]}
    names = {n for n, p in trainer.model.module.named_parameters() if id(p) in spared}
    assert {"pos_embed", "unk_embed", "cls_token", "blocks.0.norm1.weight", "head.bias"} <= names
    assert not {"head.weight", "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight"} & names


def test_labels_of_a_batch_are_distributions(tmp_path) -> None:
    trainer = Trainer(config(tmp_path))
    for images, labels in trainer.batches.epoch(1, torch.device("cpu")):
        assert images.shape == (8, 3, 32, 32)
        assert torch.allclose(labels.sum(dim=1), torch.ones(8), atol=1e-5)
        assert labels.min() >= 0.1 / 8 - 1e-6  # smoothing alone


@pytest.mark.parametrize("repeats", [1, 3])
def test_repeated_augmentation_keeps_the_epochs_length(tmp_path, repeats: int) -> None:
    trainer = Trainer(config(tmp_path, repeats=repeats))
    trainer.batches.sampler.set_epoch(5)
    order = list(trainer.batches.sampler)
    assert len(order) == 24
    assert len(set(order)) == 24 // repeats


def test_too_few_images_for_a_batch_raise(tmp_path) -> None:
    trainer = Trainer(config(tmp_path))
    with pytest.raises(UsageError, match="more than the 24 training images"):
        Batches(trainer.data.train, Recipe(), trainer.model, seed=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--batch-size", "7"], "--batch-size must be even"),
        (["--warmup-epochs", "3", "--epochs", "3"], "must be fewer than --epochs"),
        (["--erasing", "2"], "--erasing must lie in"),
        (["--rand-augment", "auto"], "--rand-augment takes none"),
        (["--colour", "0.4"], "pass --rand-augment none or --colour 0"),
        (["--mirror", "-1"], "--mirror must lie in [0, 1]"),
        (["--momentum", "0.9"], "--momentum is sgd's; leave it out with --optimizer adamw"),
        (["--optimizer", "sgd", "--momentum", "1"], "--momentum must lie in [0, 1)"),
        (["--dropout", "1"], "--dropout must lie in [0, 1)"),
        (["--defense", "mpj"], "choose from: none"),
        (["--model", "vit_huge"], "unknown model"),
        (["--block", "april"], "--block april is a block to attack"),
        (["--learning-rate", "1e30", "--epochs", "3", "--warmup-epochs", "0"], "lower --learning-rate"),
        (["--weights", "nowhere.pt", "--epochs", "30"], "no checkpoint at nowhere.pt"),
        (["--out", __file__, "--epochs", "30"], "is a file"),
    ],
)
def test_errors_are_one_line(options, words, tmp_path, capsys) -> None:
    options = options if "--out" in options else [*options, "--out", str(tmp_path / "out")]
    assert run(*options) == 2
    printed = capsys.readouterr().err.strip()
    assert words in printed
    assert printed.count("\n") == 0


def test_a_folder_is_not_reused_for_another_training(whole, capsys) -> None:
    same = ["--test-limit", "8", "--defense", "mjp", "--epochs", "3", "--warmup-epochs", "1", "--out", str(whole.out)]
    assert run(*same, "--threads", "1", "--learning-rate", "0.03") == 2
    assert "holds a training already" in capsys.readouterr().err
    assert run(*same, "--threads", "1", "--learning-rate", "0.02", "--resume") == 2
    assert "another learning_rate" in capsys.readouterr().err
    described = json.loads((whole.out / "run.json").read_text())
    assert described["config"]["recipe"]["epochs"] == 3
