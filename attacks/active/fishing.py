"""Fishing by class: a classifier that lets the images of one class alone send a gradient, out of a batch of any size.

Wen et al. 2022, "Fishing for User Data in Large-Batch Federated Learning via Gradient Magnification", section 3.2. The
server sets every row of the classifier but that of the target class t to zero, and its bias far below the others. Then
p_t = exp(-margin), which is zero in the client's arithmetic, and an image of another class sends exactly nothing to the
layers below (`attacks.active.head`); one of class t sends -w_t / B. If the batch holds one such image, the update below
the classifier is that of a batch of this image alone, and what inverts a batch of one inverts it.

The bias gradient of the same update counts the images of every class, so that labels need not be known: the first
prepared round reads them, later rounds take classes of which the client held one image.

Departs from the paper: its images are then searched by gradient matching, ours solved in closed form; its target's row
keeps the other biases' common value, ours their own; its margin leaves the other images a share that is small, ours
none.

Where labels are smoothed or mixed, other images send their share of the target class, and the reader says so.

A server that expects clients to look at what they are sent may change less (`strength`, `attacks.active.softened`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from attacks.active.base import hides_positions, nobody
from attacks.active.classifier_attack import ClassifierAttack, prepared
from attacks.active.head import SetHead, find_head, read_head, unit_direction
from attacks.active.softened import softened, softened_head
from attacks.observation import Observation, Reconstruction
from attacks.registry import UsageError

# Images that send a gradient to the layers below when p_t = exp(-margin): none in float32 from 104 on, in float64 from
# 746 on. The logit of the target may lie above its bias by far less than the difference.
MARGIN = 1000.0
POLLUTED = (
    "the client hides positions, and no row of the position gradient is zero: something that does not pass the "
    "classifier reaches the positions (a localisation loss without parameters)"
)


@dataclass(frozen=True, kw_only=True)
class Fishing(ClassifierAttack):
    """The image of one class of the batch.

    Args:
        target: the class to fish for; -1: one that the client's last prepared update held once and that was not fished
            for, else one after the other.
        strength: how far the classifier is changed, in (0, 1]. Below 1 the other images send a share of their gradients
            too, nothing is vouched for, and `target` must be named (`attacks.active.softened`).
    """

    target: int = -1
    strength: float = 1.0
    kind: ClassVar[str] = "fishing by class"

    def __post_init__(self) -> None:
        """Raise `UsageError` for a setting that cannot be used."""
        super().__post_init__()
        if not 0 < self.strength <= 1:
            raise UsageError(f"fishing.strength must lie in (0, 1], not {self.strength}")
        if self.strength < 1 and self.target < 0:
            raise UsageError("fishing.strength below 1 does not count the classes of a batch: pass fishing.target")

    def prepare(
        self, model: nn.Module, image_shape: tuple[int, int, int], history: Sequence[Observation]
    ) -> dict[str, Tensor]:
        """See `ClassifierAttack.prepare`.

        Raises:
            UsageError: the model has no classifier that can be set, or no class `target`.
        """
        layer, head = self.classifier_of(model, image_shape, least=-1)
        target = self.target if self.target >= 0 else next_class(_heads(history, layer), len(head.weight))
        bias = head.bias.detach().double().clone()
        others = torch.cat([bias[:target], bias[target + 1 :]])
        bias[target] = others.min() - MARGIN
        direction = head.weight[target].detach().double()
        if not direction.any():  # a classifier that starts at zero
            direction = unit_direction(len(direction))
        whole = prepared(model, image_shape, layer, target, direction, bias)
        return whole if self.strength == 1 else softened(model, whole, f"{layer}.bias", target, self.strength)

    def head_of(self, observation: Observation) -> SetHead:
        """See `ClassifierAttack.head_of`."""
        if self.strength == 1:
            return super().head_of(observation)
        layer = find_head(observation.model, observation.image_shape)
        return softened_head(observation, layer, self.target, self.strength)

    def is_own(self, head: SetHead) -> bool:
        """See `ClassifierAttack.is_own`: the target's bias lies below the others'."""
        return _is_fished(head)

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; one image.

        `details`: target (its class), senders (images of it in the batch, over all local steps) and, of one step,
        classes (held by the batch).
        """
        observation = observations[-1]
        head = self.head_of(observation)
        if self.strength < 1:
            return self._from_mixture(observation)
        senders = round(-head.row_gradient(observation)[1] * observation.num_examples)
        details: dict[str, float] = {"target": head.row, "senders": senders}
        labels = None
        if observation.local_steps == 1:
            counts = head.class_counts(observation)
            details["classes"] = int((counts > 0).sum())
            labels = torch.arange(len(counts)).repeat_interleave(counts.cpu())
        if senders < 1:
            held = "" if labels is None else f"; it holds the classes {_some(labels.unique().tolist())}"
            return nobody(
                f"no image of class {head.row} is in the batch, so that no image sends a gradient{held}", details
            )
        found = self.read_alone(observation, observation.gradients)
        several = senders > observation.local_steps
        reason = f"{senders} images of class {head.row} send their gradients together (feature_fishing separates them)"
        polluted = hides_positions(observation) and not found.details.get("masked")
        diagnosis = "; ".join(text for text in (reason * several, POLLUTED * polluted, found.diagnosis) if text)
        known = None if found.known is None else found.known & (not diagnosis)
        complete = labels is not None and len(labels) == observation.num_examples
        return Reconstruction(
            found.images,
            known,
            labels=labels if complete else None,
            diagnosis=diagnosis,
            details={**found.details, **details},
            flags=found.flags,
        )

    def _from_mixture(self, observation: Observation) -> Reconstruction:
        """What the reader finds where the other images send a share of their gradients too."""
        found = self.read_alone(observation, observation.gradients)
        share = f"at strength {self.strength:g} every image of the batch sends a share of its gradient"
        diagnosis = "; ".join(text for text in (share, found.diagnosis) if text)
        known = None if found.known is None else torch.zeros_like(found.known)
        details = {**found.details, "target": self.target}
        return Reconstruction(found.images, known, diagnosis=diagnosis, details=details, flags=found.flags)


def next_class(heads: Sequence[tuple[SetHead, Tensor]], classes: int) -> int:
    """The class to fish for after earlier prepared updates.

    Those that the last one held come first: once each, of those not fished for yet, the ones held once. Without such a
    class, the next in turn.

    Args:
        heads: of the earlier prepared updates, oldest first, with their class counts (K,).
        classes: K.
    """
    fished = {head.row for head, _ in heads}
    counts = heads[-1][1].tolist() if heads else []
    held = sorted((count, label) for label, count in enumerate(counts) if count and label not in fished)
    if held:
        return held[0][1]
    left = [label for label in range(classes) if label not in fished]
    return left[0] if left else len(heads) % classes


def _heads(history: Sequence[Observation], layer: str) -> list[tuple[SetHead, Tensor]]:
    """The earlier updates whose models were prepared, with their class counts."""
    found = []
    for observation in history:
        try:
            head = read_head(observation, layer)
        except UsageError:  # an honest round
            continue
        if _is_fished(head):
            found.append((head, head.class_counts(observation)))
    return found


def _is_fished(head: SetHead) -> bool:
    return bool(head.bias[head.row] < head.others(head.bias).min() - MARGIN / 2)


def _some(labels: Sequence[int], most: int = 8) -> str:
    """At most so many labels in words."""
    return ", ".join(map(str, labels[:most])) + (f" and {len(labels) - most} more" if len(labels) > most else "")
