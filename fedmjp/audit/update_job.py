"""The attacks on one update, as a task that another process or machine can compute (`fedmjp.workers`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks import Attack, Observation
from attacks.findings import Finding
from fedmjp.audit.harness import Scored, ScoreImages, answer, audit_update, unscored


@dataclass(frozen=True)
class UpdateJob:
    """One update and what is to be run on it. Holds no file and no display.

    Attributes:
        observations: the client's updates so far, the attacked one last.
        originals: (B, C, H, W) in [0, 1]; None where they are not known, so that nothing is scored.
        image_ids: names of the B images.
        attacks: by name, those that are wanted.
        baselines: name -> (B, C, H, W) guesses that are wanted; they come first.
        weights_granted: the adversary may use the model's weights, so that answers can be certified.
        findings: what was noticed about the update.
    """

    observations: Sequence[Observation]
    originals: Tensor | None
    image_ids: Sequence[str]
    attacks: Mapping[str, Attack]
    baselines: Mapping[str, Tensor]
    weights_granted: bool
    findings: Sequence[Finding] = ()

    @property
    def observation(self) -> Observation:
        """The attacked update."""
        return self.observations[-1]

    @property
    def names(self) -> list[str]:
        """Of the guesses and attacks, in the order in which they run."""
        return [*self.baselines, *self.attacks]

    def single(self) -> list[UpdateJob]:
        """A job for each guess and attack, so that its rows can be written before the next one runs."""
        return [
            replace(
                self,
                attacks={n: a for n, a in self.attacks.items() if n == name},
                baselines={n: g for n, g in self.baselines.items() if n == name},
            )
            for name in self.names
        ]


def run_job(score_images: ScoreImages, job: UpdateJob) -> list[Scored]:
    """What each guess and attack of a job gives, in the order of `UpdateJob.names`."""
    if job.originals is not None:
        found = audit_update(
            job.observations,
            job.originals,
            attacks=job.attacks,
            baselines=job.baselines,
            score_images=score_images,
            weights_granted=job.weights_granted,
            findings=job.findings,
        )
        return list(found)
    with torch.no_grad():
        answers = {n: answer(a, job.observations, weights_granted=job.weights_granted) for n, a in job.attacks.items()}
    size = len(job.image_ids)
    return [unscored(job.attacks[name], name, found, size, job.findings) for name, found in answers.items()]
