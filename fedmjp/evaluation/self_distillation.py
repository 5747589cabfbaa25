"""Whether MST's pretext task is learned: distillation against collapse, restoration against the mean colour.

A student that ignores the image can do no better than to predict the teacher's mean output, at a cross-entropy of that
mean's entropy; a teacher that has collapsed makes this trivial, and its entropies show it.
Views and masks are drawn from a fixed seed, so that the same weights give the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from fedmjp.data import ImageSet
from fedmjp.defenses import ClientInput
from fedmjp.models import BuiltModel
from fedmjp.objectives.base import TrainingBatch
from fedmjp.objectives.distillation import Teacher, distillation_loss, entropy, teacher_targets
from fedmjp.objectives.mst import MST
from fedmjp.objectives.mst_loss import pass_views
from fedmjp.objectives.restoration import patch_values

BATCH = 64


@dataclass(frozen=True)
class Pretext:
    """What the pretext task has come to on images that were not trained on; NaN where the options leave a part out.

    Attributes:
        distillation: cross-entropy over crossed views, nats.
        collapse: entropy of the teacher's mean output, nats: the least cross-entropy of a student that ignores the
            image. Near 0 if the teacher has collapsed to a point.
        teacher_entropy: mean entropy of the teacher's outputs, nats; near log K if it is uniform.
        restoration: mean absolute error of all pixels of global crops, normalised.
        restoration_hidden: the same over hidden patches.
        mean_colour: mean absolute distance to each crop's own mean colour, all pixels.
        mean_colour_hidden: the same over hidden patches.
    """

    distillation: float
    collapse: float
    teacher_entropy: float
    restoration: float
    restoration_hidden: float
    mean_colour: float
    mean_colour_hidden: float


@torch.no_grad()
def measure_pretext(
    options: MST, model: BuiltModel, teacher: Teacher | None, images: ImageSet, device: torch.device, seed: int = 0
) -> Pretext:
    """Measure on views of `images`; the model is left in evaluation mode.

    Args:
        options: of the objective that is measured.
        model, teacher: on `device`.
        images: at least one.
        seed: of views and masks.
    """
    model.module.eval()
    generator, means = torch.Generator().manual_seed(seed), _Means()
    for start in range(0, len(images), BATCH):
        part = images.images(range(start, min(start + BATCH, len(images)))).to(device)
        views = tuple(ClientInput(view) for view in options.views(part, model, generator))
        passed = pass_views(options, model, TrainingBatch(views, None, generator, 1.0), teacher)
        if options.lambda_1:
            centre = model.module.pretext.centre
            targets = [teacher_targets(one, centre, options.teacher_temperature) for one in passed.targets]
            loss = distillation_loss(passed.student, targets, options.student_temperature)
            means.add("distillation", loss.expand(len(part)))
            means.add("target", torch.cat(targets))
            means.add("teacher_entropy", entropy(torch.cat(targets)))
        for restored, view, mask in zip(passed.restored, passed.views, passed.masks, strict=False):
            for name, found in (("restoration", restored), ("mean_colour", view.images.mean(dim=(2, 3), keepdim=True))):
                errors = patch_values((found - view.images).abs(), model.module.patch_embed.patch_size)  # (B, N, C p q)
                means.add(name, errors.flatten())
                if mask is not None:
                    means.add(f"{name}_hidden", errors[mask].flatten())
    collapse = float(entropy(means["target"]))
    return Pretext(collapse=collapse, **{f.name: float(means[f.name]) for f in fields(Pretext) if f.name != "collapse"})


class _Means:
    """Running means over the first dimension, by name; NaN for a name under which nothing was added."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[torch.Tensor, int]] = {}

    def add(self, name: str, values: torch.Tensor) -> None:
        """Add values (B, ...) to the mean of that name."""
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = total + values.double().sum(dim=0), count + len(values)

    def __getitem__(self, name: str) -> torch.Tensor:
        total, count = self._sums.get(name, (torch.tensor([float("nan")]), 1))
        return total / max(1, count)
