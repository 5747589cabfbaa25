"""MST in central training: the paper's recipe, exact resume, mistakes in one line, a pretext task that is learned."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from fedmjp import train as train_command
from fedmjp.config import DataConfig, ModelConfig
from fedmjp.data import load_data
from fedmjp.evaluation.self_distillation import measure_pretext
from fedmjp.objectives import Draws
from fedmjp.training.config import default_config
from fedmjp.training.trainer import Trainer
from tests.objectives.test_mst import TINY, learner
from tests.objectives.test_position_prediction import draw


def test_the_papers_recipe() -> None:
    config = default_config("mst")
    config.validate()
    recipe, options = config.recipe, config.chosen_objective()
    assert recipe.learning_rate * recipe.batch_size / 512 == 2e-3
    assert (recipe.batch_size, recipe.weight_decay, recipe.warmup_epochs) == (1024, 0.04, 10)
    assert (options.lambda_1, options.lambda_2, options.momentum, options.share) == (1.0, 0.6, 0.996, 0.125)
    assert dataclasses.replace(options, masking="random", replacement="bert", restored="masked").validate() is None
    assert options._cells(14) * 16 == 96  # DINO's local crops of 224


def test_a_resumed_training_ends_in_the_same_bits() -> None:
    config = default_config(f"mst:{TINY},local_crops=1,momentum=0.5")
    config = dataclasses.replace(
        config,
        model=ModelConfig("vit_micro_32", "random"),
        data=DataConfig("photos", None, 16, 8),
        recipe=dataclasses.replace(config.recipe, epochs=2, batch_size=8, warmup_epochs=1),
    )
    whole, broken, resumed = Trainer(config), Trainer(config), Trainer(config)
    wanted = [whole.epoch(number, lambda loss: None) for number in (1, 2)]
    broken.epoch(1, lambda loss: None)
    resumed.load_state(broken.state())
    found = resumed.epoch(2, lambda loss: None)
    assert (found["train_loss"], found["test_loss"]) == (wanted[1]["train_loss"], wanted[1]["test_loss"])
    for one, other in ((whole.model.module, resumed.model.module), (whole.learner.local, resumed.learner.local)):
        pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    student, teacher = whole.model.module, whole.learner.local.network
    assert not torch.equal(student.blocks[0].mlp.fc1.weight, teacher.blocks[0].mlp.fc1.weight)


SMALL = ["--data", "photos", "--train-limit", "16", "--model", "vit_micro_32", "--batch-size", "8"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["mst:momentum=1"], "momentum of objective 'mst' must lie in [0, 1), not 1.0"),
        (["mst:centre_momentum=-0.1"], "centre_momentum of objective 'mst' must lie in [0, 1)"),
        (["mst:p=1.5"], "p of objective 'mst' must lie in [0, 1], not 1.5"),
        (["mst:share=0"], "share of objective 'mst' must lie in (0, 1], not 0.0"),
        (["mst:share=0.001"], "share=0.001 of objective 'mst' makes none of the 64 patches a candidate"),
        (["mst:teacher_temperature=0"], "teacher_temperature of objective 'mst' must be above 0"),
        (["mst:student_temperature=inf"], "student_temperature of objective 'mst' must be above 0"),
        (["mst:outputs=0"], "outputs of objective 'mst' must be at least 1"),
        (["mst:lambda_2=-1"], "lambda_2 of objective 'mst' must not be negative"),
        (["mst:lambda_1=0,lambda_2=0"], "there is nothing to learn"),
        (["mst:local_area=0.4,0.05"], "local_area of objective 'mst' must be two shares, the smaller first, in (0, 1]"),
        (["mst:local_area=0.4"], "local_area of objective 'mst' takes"),
        (["mst:local_side=0.05"], "local_side=0.05 of objective 'mst' is less than a patch of vit_micro_32"),
        (["mst:local_crops=-1"], "local_crops of objective 'mst' must not be negative"),
        (["mst:masking=none,restored=masked"], "restored=masked of objective 'mst' needs hidden patches"),
        (["mst:masking=most"], "takes one of none, random, attention, attended, not 'most'"),
        (["mst:teacher=both"], "takes one of client, server, not 'both'"),
        (["mst", "--defense", "mjp"], "pass mst:local_crops=0"),
        (["mst", "--defense", "spp"], "pass mst:local_crops=0"),
        (["mst:local_crops=0", "--defense", "mjp", "--positions", "index"], "which embeds patches' origins"),
        (["mst", "--model", "resnet50"], "--objective mst needs a plain ViT, not resnet50"),
        (["mst", "--model", "vit_micro_32_rel"], "not vit_micro_32_rel"),
        (["mst", "--mixup", "0.8"], "has no labels to mix or smooth; pass --mixup 0"),
    ],
)
def test_errors_are_one_line(options, words: str, tmp_path, capsys) -> None:
    assert train_command.main([*SMALL, "--objective", *options, "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err.strip()
    assert words in printed
    assert printed.count("\n") == 0


@pytest.mark.long
def test_the_pretext_task_can_be_learned() -> None:
    """On a few photographs in ever new crops: outputs tell images apart, pixels beat the mean colour."""
    made = learner("mst:outputs=16,hidden=64,bottleneck=16,local_crops=2,momentum=0.95,frozen=0")
    images, model = load_data("photos", size=32).train.subset(range(8)), made.model
    decoded = images.images(range(8))
    before = measure_pretext(made.objective, model, made.local, images, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.module.parameters(), 3e-3)
    draws = Draws(draw(1), draw(2))
    for step in range(150):
        model.module.train()
        loss = made.loss(made.views(decoded, draws, 1), None, draws, step / 150)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        made.after_step(step / 150)
    after = measure_pretext(made.objective, model, made.local, images, torch.device("cpu"))
    assert after.collapse > 0.5 * math.log(16)  # not a point
    assert after.teacher_entropy < 0.9 * math.log(16)  # not uniform
    assert after.distillation < after.collapse - 0.1
    assert after.restoration < 0.7 * after.mean_colour < before.restoration
