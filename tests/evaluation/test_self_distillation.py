"""MST's pretext task on images that were not trained on, against the loss and loops over the same views."""

from __future__ import annotations

import math

import pytest
import torch

from fedmjp.config import ModelConfig
from fedmjp.data import load_data
from fedmjp.defenses import DEFENSES, ClientInput
from fedmjp.evaluation.self_distillation import measure_pretext
from fedmjp.objectives import Learner, TrainingBatch, read_objective
from fedmjp.objectives.mst_loss import mst_loss, pass_views

CPU = torch.device("cpu")
TINY = "outputs=6,hidden=5,bottleneck=4,local_crops=1"


def learner(entry: str) -> Learner:
    config = ModelConfig("vit_micro_32", "random")
    return Learner.build(read_objective(entry), DEFENSES.get("none")(), config, num_classes=2, seed=0, device=CPU)


def seen(made: Learner, images, seed: int = 0) -> TrainingBatch:
    """The views that `measure_pretext` makes of one batch, and its generator after them."""
    generator = torch.Generator().manual_seed(seed)
    views = made.objective.views(images.images(range(len(images))), made.model, generator)
    return TrainingBatch(tuple(map(ClientInput, views)), None, generator, 1.0)


def test_measures_are_those_of_the_loss() -> None:
    images = load_data("photos", size=32).test
    both, alone = learner(f"mst:{TINY},share=0.5"), learner(f"mst:{TINY},share=0.5,lambda_2=0")
    found = measure_pretext(both.objective, both.model, both.local, images, CPU)
    assert found == measure_pretext(both.objective, both.model, both.local, images, CPU)
    assert found != measure_pretext(both.objective, both.model, both.local, images, CPU, seed=1)
    with torch.no_grad():
        both.model.module.eval()
        total = mst_loss(both.objective, both.model, seen(both, images), both.local)
        passed = pass_views(both.objective, both.model, seen(both, images), both.local)
    assert found.distillation + 0.6 * found.restoration == pytest.approx(float(total), abs=1e-5)
    assert 0 < found.teacher_entropy <= found.collapse <= math.log(6) + 1e-6
    whole, hidden, restored = [], [], []
    for view, mask, back in zip(passed.views[:2], passed.masks, passed.restored, strict=True):
        for image, row, own in zip(view.images, mask, back, strict=True):
            off = (image - image.mean(dim=(1, 2), keepdim=True)).abs()
            whole.append(float(off.mean()))
            for n in torch.nonzero(row).flatten().tolist():
                cut = (slice(None), slice(4 * (n // 8), 4 * (n // 8) + 4), slice(4 * (n % 8), 4 * (n % 8) + 4))
                hidden.append(float(off[cut].mean()))
                restored.append(float((own - image).abs()[cut].mean()))
    assert found.mean_colour == pytest.approx(sum(whole) / len(whole), abs=1e-5)
    assert found.mean_colour_hidden == pytest.approx(sum(hidden) / len(hidden), abs=1e-5)
    assert found.restoration_hidden == pytest.approx(sum(restored) / len(restored), abs=1e-5)
    left_out = measure_pretext(alone.objective, alone.model, alone.local, images, CPU)
    assert math.isnan(left_out.restoration)
    assert not math.isnan(left_out.distillation)


def test_masked_modelling_alone_has_no_distillation() -> None:
    images = load_data("photos", size=32).test
    made = learner(f"mst:{TINY},lambda_1=0,masking=random,restored=masked")
    found = measure_pretext(made.objective, made.model, made.local, images, CPU)
    assert math.isnan(found.distillation)
    assert math.isnan(found.collapse)
    assert found.restoration_hidden > 0
