"""The registry of objectives, and the path that a client and central training share."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from safetensors import safe_open
from torch import nn

from attacks import UsageError
from fedmjp import simulate as simulate_command
from fedmjp import train as train_command
from fedmjp.client import ClientTask
from fedmjp.config import DataConfig, FederationConfig, ModelConfig, RunConfig
from fedmjp.defenses import DEFENSES
from fedmjp.models import build_model
from fedmjp.models.weights import ORIGIN
from fedmjp.objectives import OBJECTIVES, Draws, Learner, Objective, client_loss, objective_help, read_objective
from fedmjp.records.rows import load_rows
from fedmjp.settings import write_value
from fedmjp.training import Recipe, TrainConfig, train
from fedmjp.training.folder import TrainingFolder
from fedmjp.training.trainer import Trainer
from tests.conftest import photographs
from tests.training.test_train import QUIET

DATA = DataConfig(data="photos", train_limit=24, test_limit=8)
PLAIN = Recipe(
    epochs=2, batch_size=8, warmup_epochs=1, mixup=0, cutmix=0, label_smoothing=0, erasing=0, rand_augment="none"
)


class Teacher(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(width), requires_grad=False)
        self.register_buffer("steps", torch.zeros(()))


@dataclass(frozen=True)
class Brightness(Objective):
    """Predicts an image's mean from each of two views, with a teacher: every hook of an objective is used."""

    accuracy_of: ClassVar[str] = "bright images"
    recipe: ClassVar[dict] = {"mixup": 0.0, "cutmix": 0.0, "label_smoothing": 0.0, "batch_size": 16}
    noise: float = 0.1
    """Standard deviation."""

    def attach(self, module):
        module.reset_classifier(0)
        module.pretext = nn.Linear(module.embed_dim, 1)

    def local(self, model):
        return Teacher(model.module.embed_dim)

    def views(self, images, model, generator):
        return images, images + self.noise * torch.randn(images.shape, generator=generator)

    def loss(self, model, batch, local):
        assert batch.labels is not None
        total = 0.0
        for seen in batch.views:
            features = model.module.forward_features(model.normalise(seen.images))[:, 0]
            found = model.module.pretext(features + local.mean)[:, 0]
            total = total + (found - seen.images.mean(dim=(1, 2, 3))).square().mean()
        return total + batch.progress

    def after_step(self, model, local, progress):
        local.steps += 1
        local.mean.lerp_(model.module.norm.weight.detach(), 0.1)

    def evaluate(self, model, local, data, device):
        return float(local.steps), 0.5


@pytest.fixture
def brightness(monkeypatch) -> None:
    monkeypatch.setitem(OBJECTIVES._sources, "brightness", [])
    monkeypatch.setitem(OBJECTIVES._entries, "brightness", Brightness)
    monkeypatch.setattr(OBJECTIVES, "check", lambda name: None)


def draws(seed: int = 0) -> Draws:
    return Draws.seeded(seed, seed + 1)


def test_supervised_is_the_clients_cross_entropy() -> None:
    """With MJP and its localisation loss, the learner's loss is the client's of a model built by hand, to the bit."""
    defense = DEFENSES.get("mjp")(gamma=0.5)
    config = ModelConfig("vit_mini_32", "random")
    learner = Learner.build(
        read_objective("supervised"), defense, config, num_classes=8, seed=3, device=torch.device("cpu")
    )
    model = build_model("vit_mini_32_mjp", num_classes=8, weights="random", dal="nonlinear", seed=3)
    images, labels = photographs(32, 4), torch.arange(4)
    loss = learner.loss(learner.views(images, draws(), 1), labels, draws())
    seen = defense.on_input(images, model, torch.Generator().manual_seed(0), 1)
    logits = model.module(model.normalise(seen.images), position_mask=seen.position_mask)
    by_hand = nn.functional.cross_entropy(logits, labels)
    by_hand = by_hand + 0.01 * model.module.dal(model.module.patch_positions(), model.grid, seen.position_mask)
    assert torch.equal(loss, by_hand)
    assert torch.equal(loss, client_loss(model, seen.images, labels, seen.position_mask, defense.loss_weights()))


def test_supervised_without_labels_is_one_line() -> None:
    learner = Learner.build(
        read_objective("supervised"),
        DEFENSES.get("none")(),
        ModelConfig("vit_mini_32", "random"),
        num_classes=8,
        seed=0,
        device=torch.device("cpu"),
    )
    with pytest.raises(UsageError, match="needs labels"):
        learner.loss(learner.views(photographs(32, 2), draws(), 1), None, draws())


def test_central_training_uses_every_hook(brightness, tmp_path) -> None:
    config = TrainConfig(
        objective="brightness:noise=0.5",
        model=ModelConfig("vit_mini_32", "random"),
        data=DATA,
        recipe=PLAIN,
        out=tmp_path / "out",
    )
    trainer = Trainer(config)
    assert not any(n.startswith("head.") for n, _ in trainer.model.module.named_parameters())
    train(config, QUIET)
    state, history = TrainingFolder(TrainConfig(**(vars(config) | {"resume": True}))).load()
    assert [line["test_loss"] for line in history] == [3.0, 6.0]  # the teacher has seen every step
    assert float(state["kept"]["steps"]) == 6
    assert "pretext.weight" in state["model"]
    assert not any("mean" in name for name in state["model"])
    with safe_open(config.out / "model.safetensors", "pt") as file:
        origin = json.loads(file.metadata()[ORIGIN])
    assert (origin["objective"], origin["model"]) == ("brightness:noise=0.5", "vit_mini_32")
    card = (config.out / "model.md").read_text()
    assert "50.0% of bright images in 8 test images" in card
    assert "brightness, noise 0.5" in card


def test_a_client_sends_the_heads_and_keeps_the_rest(brightness) -> None:
    config = RunConfig(
        objective="brightness",
        model=ModelConfig("vit_mini_32", "random"),
        data=DATA,
        federation=FederationConfig(clients=2, rounds=4, update="weights", local_steps=2, batch_size=2),
    )
    task = ClientTask(config, "none")
    sent = {n: p.detach().clone() for n, p in (task.parameters | task.buffers).items()}
    result = task.update(0, 3, sent)
    assert set(result.tensors) == {n for n, _ in task.model.module.named_parameters()}
    assert "pretext.weight" in result.tensors
    assert (result.tensors["pretext.weight"] != sent["pretext.weight"]).any()
    assert result.loss > 0.5  # the progress of round 3 of 4
    assert float(task.learner.local.steps) == 2
    task.update(1, 3, sent)
    assert float(task.learner.local.steps) == 2  # another client starts from the weights that it receives
    assert float(task.update(0, 4, sent, kept=result.kept).kept["steps"]) == 4
    again = ClientTask(config, "none").update(0, 3, sent)
    assert all(torch.equal(again.tensors[n], t) for n, t in result.tensors.items())


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("supervisd", "did you mean 'supervised'"),
        ("supervised:gamma=1", "objective 'supervised' has no setting 'gamma'; choose from: pool"),
        ("supervised:gamma", "--objective takes NAME or NAME:option=value"),
    ],
)
@pytest.mark.parametrize("command", [train_command, simulate_command])
def test_bad_entries_are_one_line(command, entry: str, words: str, tmp_path, capsys) -> None:
    assert command.main(["--objective", entry, "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err.strip()
    assert words in printed
    assert printed.count("\n") == 0


def test_the_papers_recipe_becomes_the_default(brightness) -> None:
    from fedmjp.training.config import default_config

    config = default_config("brightness:noise=0.2")
    assert (config.recipe.batch_size, config.recipe.mixup, config.recipe.warmup_epochs) == (16, 0, 20)
    config.validate()
    with pytest.raises(UsageError, match="no labels to mix or smooth; pass --mixup 0 --cutmix 0 --label-smoothing 0"):
        TrainConfig(objective="brightness").validate()


def test_what_a_client_keeps_lasts_over_rounds(brightness, tmp_path, monkeypatch) -> None:
    """Through Flower: each of two clients keeps a teacher of its own, which no message holds."""
    kept = {}
    update = ClientTask.update

    def noted(self, client, round, *arguments):
        result = update(self, client, round, *arguments)
        kept[client, round] = float(result.kept["steps"])
        return result

    monkeypatch.setattr(ClientTask, "update", noted)
    options = ["--model", "vit_mini_32", "--weights", "random", "--clients", "2", "--rounds", "2", "--test-limit", "8"]
    options += ["--objective", "brightness", "--update", "weights", "--local-steps", "3"]
    attacks = ["--attacks", "patch_embedding", "dlg"]
    assert simulate_command.main([*options, *attacks, "--out", str(tmp_path / "run")]) == 0
    assert kept == {(0, 1): 3, (1, 1): 3, (0, 2): 6, (1, 2): 6}
    rows = load_rows(tmp_path / "run" / "rows.jsonl")
    assert set(rows["objective"]) == {"brightness"}
    assert rows["objective_parameters"].iloc[0] == {"noise": 0.1}
    notes = json.loads((tmp_path / "run" / "run.json").read_text())["notes"]
    assert notes == ["The clients train the objective brightness; accuracy counts bright images, not classes."]
    assert notes[0] in (tmp_path / "run" / "report.html").read_text()
    refused = rows[rows["attack"] == "dlg"]["diagnosis"]
    assert refused.str.contains("simulates a client that minimises cross-entropy, and this one trains brightness").all()


def test_rows_name_the_objective(tmp_path) -> None:
    options = ["--model", "vit_mini_32", "--weights", "random", "--clients", "1", "--rounds", "1"]
    assert simulate_command.main([*options, "--attacks", "patch_embedding", "--out", str(tmp_path / "run")]) == 0
    rows = load_rows(tmp_path / "run" / "rows.jsonl")
    assert set(rows["objective"]) == {"supervised"}
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["objective"] == "supervised"


def test_the_help_gives_options_as_they_are_typed() -> None:
    text = objective_help()
    for name, kind in OBJECTIVES.available().items():
        for option in dataclasses.fields(kind):
            typed = f"{option.name}={write_value(option.default)}"
            assert typed in text
            assert read_objective(f"{name}:{typed}") == kind()
