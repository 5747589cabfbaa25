"""Runs the chosen attacks on one update and scores what comes back against the originals.

The auditor alone holds both sides: the adversary's `Observation` and the client's batch. Every image of every attack
becomes one flat record of scores; two records that need no gradient at all (the mean image of the data, and another
image of it) stand beside them as the floor that an attack has to beat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attacks import Attack, Observation, Reconstruction
from fedmjp.audit.assignment import match
from fedmjp.metrics import METRIC_DIRECTIONS, score

BASELINES = ("mean_image", "other_image")
ScoreImages = Callable[[Tensor, Tensor], list[dict[str, float]]]


@dataclass(frozen=True)
class Scored:
    """One attack on one update, scored.

    Attributes:
        attack: name of the attack or of the baseline.
        parameters: its configuration.
        images: (B, C, H, W) reconstructions in the order of the originals, or None.
        records: for each image of the batch the metrics by name (NaN where there is no image).
        reconstruction: as the attack returned it; None for baselines.
    """

    attack: str
    parameters: Mapping[str, Any]
    images: Tensor | None
    records: list[dict[str, float]]
    seconds: float
    diagnosis: str
    reconstruction: Reconstruction | None = None

    def row(self, case: Mapping[str, Any], image_id: str, gradient_norm: float, place: int = 0) -> dict[str, Any]:
        """The results row of one image, but for the run's own columns.

        Args:
            case: what tells rows apart (`report.rows.CASE`).
            place: of the image in its batch.
        """
        details = dict(self.reconstruction.details) if self.reconstruction else {}
        flags = list(self.reconstruction.flags) if self.reconstruction else []
        answer = {"seconds": self.seconds, "diagnosis": self.diagnosis, "details": details, "flags": flags}
        where = {"image": place, "image_id": image_id, "gradient_norm": gradient_norm}
        return {**case, **where, **self.records[place], **answer}


def run_attack(
    attack: Attack, name: str, observations: Sequence[Observation], originals: Tensor, score_images: ScoreImages
) -> Scored:
    """Run one attack on the last of `observations` and score it against `originals` (B, C, H, W)."""
    return score_found(attack, name, [attack(observations)], [originals], score_images)[0]


def score_found(
    attack: Attack,
    name: str,
    found: Sequence[Reconstruction],
    originals: Sequence[Tensor],
    score_images: ScoreImages,
) -> list[Scored]:
    """Score the answers of one attack on several updates, all images in one batch.

    Args:
        originals: for each update (B, C, H, W) in [0, 1], all of one size.
    """
    pairs = zip(found, originals, strict=True)
    images = [None if f.images is None else _matched(f.images.to(o), o) for f, o in pairs]
    present = [i for i, batch in enumerate(images) if batch is not None]
    records = iter(
        score_images(torch.cat([images[i] for i in present]), torch.cat([originals[i] for i in present]))
        if present
        else []
    )
    scored = []
    for answer, batch, target in zip(found, images, originals, strict=True):
        missing = dict.fromkeys(METRIC_DIRECTIONS, float("nan"))
        own = [missing if batch is None else next(records) for _ in target]
        scored.append(Scored(name, attack.parameters(), batch, own, answer.seconds, answer.diagnosis, answer))
    return scored


def _matched(reconstructions: Tensor, originals: Tensor) -> Tensor:
    return reconstructions[match(reconstructions, originals)]


def scorer(patch_size: int, lpips: Callable | None) -> ScoreImages:
    """A function from (reconstructions, originals) to one dict of metrics an image."""

    def score_images(reconstructions: Tensor, originals: Tensor) -> list[dict[str, float]]:
        columns = score(reconstructions, originals, patch_size=patch_size, lpips=lpips)
        lists = {name: values.tolist() for name, values in columns.items()}  # one transfer a metric, not one a number
        return [{name: values[i] for name, values in lists.items()} for i in range(len(originals))]

    return score_images


def audit_update(
    observations: Sequence[Observation],
    originals: Tensor,
    *,
    attacks: Mapping[str, Attack],
    baselines: Mapping[str, Tensor],
    score_images: ScoreImages,
    skip: Callable[[str], bool] = lambda name: False,
) -> Iterator[Scored]:
    """Baselines, then attacks, on one update.

    Args:
        observations: the client's updates so far, the audited one last.
        originals: (B, C, H, W) in [0, 1].
        attacks: by name.
        baselines: name -> (B, C, H, W) guesses that need no gradient.
        skip: names whose rows are already written.
    """
    for name, guess in baselines.items():
        if not skip(name):
            yield Scored(name, {}, guess, score_images(guess, originals), 0.0, "")
    for name, attack in attacks.items():
        if not skip(name):
            with torch.no_grad():
                yield run_attack(attack, name, observations, originals, score_images)
