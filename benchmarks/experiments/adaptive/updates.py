"""Clients of one image each that send one update after the other, the model drifting in between, and their attackers.

`Updates` holds no file and no display, so that another machine can compute it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attacks import Attack, Observation
from attacks.memory import remember
from experiments.adaptive.options import Options
from fedmjp.audit.harness import Scored, ScoreImages, score_found
from fedmjp.audit.victims import Setting, Subject, Victims, drifted
from fedmjp.defenses import Defense
from fedmjp.metrics.pixel import LEAST_MSE

MASKED = Setting("masked", defended=True, hidden=True, against="original")

Plan = dict[int, dict[str, Attack]]  # number of updates -> the attacks that follow, by name


@dataclass(frozen=True)
class Case:
    """One curve's clients.

    Attributes:
        defense: of the clients.
        schedule: "paper", or "released" where half the steps are not jigsawed.
        once: what `--attacks` asks for, after the first update.
        counts: numbers of updates after which the attacks of `--update-attacks` follow.
        block: the model's first block.
    """

    defense: Defense
    schedule: str
    once: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()
    block: str = "standard"

    @property
    def title(self) -> str:
        """For a line of progress."""
        gamma = f"gamma {self.defense.gamma}, " if hasattr(self.defense, "gamma") else ""
        choice = getattr(self.defense, "mask_choice", "block")
        masks = f"{choice} masks, " if choice != "block" else ""
        return f"{gamma}{masks}{self.schedule} schedule"

    @property
    def updates(self) -> int:
        """How many updates the clients send."""
        return max((1, *self.counts))


@dataclass(frozen=True)
class Sent:
    """What clients of one image each sent their last update of.

    Attributes:
        clients: their numbers.
        originals, fed: (clients, C, H, W) in [0, 1], and what the model saw of them.
        masks: (clients, N) bool, the patches without their position.
        patch_size: side of a patch in pixels.
    """

    clients: list[int]
    originals: Tensor
    fed: Tensor
    masks: Tensor
    patch_size: int


@dataclass(frozen=True)
class Found:
    """What a batch of clients gave.

    Attributes:
        rows: (what identifies a row, its image, the row).
        warnings: lines for the user.
    """

    rows: list[tuple[dict[str, Any], str, dict[str, Any]]]
    warnings: list[str]


@dataclass(frozen=True)
class Updates:
    """What clients of one image each send, and what the attacks make of it.

    Attributes:
        options: of the command.
        subjects: the model that clients are sent in their first update, by its first block.
        score: see `harness.scorer`.
        columns: columns that are the same in all rows of the call.
    """

    options: Options
    subjects: Mapping[str, Subject]
    score: ScoreImages
    columns: Mapping[str, Any]

    def rows_of(
        self, case: Case, plan: Plan, victims: Victims, advance: Callable[[], None], batch: Sequence[int]
    ) -> Found:
        """What every attack on a batch of clients gives."""
        warnings: list[str] = []
        found, own = [], victims.with_warnings(warnings.append)
        for number, client, name, one, last, _ in self.follow(case, plan, own, batch, advance):
            line, image_id = self.case(own, case, number, name, plan[number][name]), own.ids(client)[0]
            found.append((line, image_id, {**self.columns, **one.row(line, image_id, last.gradient_norm())}))
        return Found(found, warnings)

    def sent(
        self, case: Case, victims: Victims, batch: Sequence[int], plan: Plan | None = None
    ) -> Iterator[tuple[int, list[list[Observation]], Sent]]:
        """Let clients send one update after the other.

        Args:
            plan: the attacks that read the updates; without them, gradients of the layers that make the tokens alone.

        Yields:
            (updates so far, each client's, what they sent of); all but the last update of a client are compressed.
        """
        clients, originals = victims.decode(batch)
        histories: list[list[Observation]] = [[] for _ in clients]
        built = self.subjects[case.block].built
        for number in range(1, (case.updates if clients else 0) + 1):
            built = drifted(built, self.options.drift, self.options.seed, number) if number > 1 else built
            seen = victims.seen(built, MASKED, clients, originals, update=number - 1)
            due = (plan or {}).get(number, {})
            terms = victims.defense.loss_weights()
            observations = victims.observe(built, seen, clients, due.values(), terms, update=number - 1)
            for history, observation in zip(histories, observations, strict=True):
                history.append(observation)
            masks = torch.zeros(len(clients), math.prod(built.grid), dtype=torch.bool)
            masks = masks if seen.position_mask is None else seen.position_mask
            yield number, histories, Sent(clients, originals, seen.images, masks, built.patch_size)
            for history in histories:
                history[-1] = remember(history[-1])

    def follow(
        self, case: Case, plan: Plan, victims: Victims, batch: Sequence[int], advance: Callable[[], None]
    ) -> Iterator[tuple[int, int, str, Scored, Observation, Tensor]]:
        """Let clients send one update after the other, and attack.

        Yields:
            (updates so far, client, attack, its scored answer, last observation, what the model saw last (C, H, W)).
        """
        for number, histories, sent in self.sent(case, victims, batch, plan):
            for name, attack in plan.get(number, {}).items():
                found = attack.attack_many(histories)
                scored = score_found(attack, name, found, list(sent.originals[:, None]), self.score)
                own = zip(sent.originals, sent.fed, sent.masks, strict=True)
                pairs = zip(sent.clients, own, scored, histories, strict=True)
                for client, (original, fed, mask), one, history in pairs:
                    details = one.reconstruction.details | psnr_by_mask(one.images, original, mask, sent.patch_size)
                    answer = replace(one.reconstruction, details=details)
                    yield number, client, name, replace(one, reconstruction=answer), history[-1], fed
            advance()

    def case(self, victims: Victims, case: Case, number: int, name: str, attack: Attack) -> dict[str, Any]:
        """The values that identify a row (`records.rows.CASE`)."""
        subject, parameters = self.subjects[case.block], attack.parameters()
        found = victims.case(subject, self.options.defense, case.schedule, name, parameters, round=number)
        return found if self.options.image_size is None else found | {"model": subject.built.sized_name}


def psnr_by_mask(images: Tensor | None, original: Tensor, mask: Tensor, patch_size: int) -> dict[str, float]:
    """What visible and masked patches (N,) bool contribute to the PSNR (dB) of one image.

    Returns:
        psnr_visible, over the visible patches; psnr_visible_exact, over all patches if the visible ones were exact.
        NaN where there is no image or no such patch.
    """
    names = ("psnr_visible", "psnr_visible_exact")
    if images is None:
        return dict.fromkeys(names, float("nan"))
    error = F.avg_pool2d((images[0] - original).square().mean(dim=0)[None, None], patch_size).flatten()  # (N,)
    mask = mask.to(error.device)
    parts = (error[~mask], error * mask if mask.any() else error[:0])
    return {n: float(-10 * part.mean().clamp(min=LEAST_MSE).log10()) for n, part in zip(names, parts, strict=True)}
