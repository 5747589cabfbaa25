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

Where a client takes several local steps, the classifier moves with the first, and the others send too. `local_steps`
sets one that does not move (`attacks.active.held`), so that the class alone sends in every step.

Where labels are smoothed or mixed, other images send their share of the target class, and the reader says so.

A server that expects clients to look at what they are sent may change less (`strength`, `attacks.active.softened`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attacks.active.base import SendContext, Sending, hides_positions, nobody
from attacks.active.classifier_attack import ClassifierAttack, set_classifier
from attacks.active.head import SetHead, find_head, unit_direction
from attacks.active.held import LocalSteps, exact_channels, held_model
from attacks.active.softened import softened, softened_head
from attacks.observation import Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import find_tokenizer

# Images that send a gradient to the layers below when p_t = exp(-margin): none in float32 from 104 on, in float64 from
# 746 on. The logit of the target may lie above its bias by far less than the difference.
MARGIN = 1000.0
POLLUTED = (
    "the client hides positions, and no row of the position gradient is zero: something that does not pass the "
    "classifier reaches the positions (a localisation loss without parameters)"
)

MOVED = (
    "the rows of the classifier did not stay equal through the local steps (too large a rate, or weight decay that is "
    "part of the gradient): images of other classes send as well"
)


@dataclass(frozen=True, kw_only=True)
class Fishing(ClassifierAttack):
    """The image of one class of the batch.

    Args:
        target: the class to fish for; -1: one that the client's last prepared update held once and that was not fished
            for, else one after the other.
        local_steps: what the clients do between two messages: one step, or several of SGD (momentum or not) or of
            AdamW.
        strength: how far the classifier is changed, in (0, 1]. Below 1 the other images send a share of their gradients
            too, nothing is vouched for, and `target` must be named (`attacks.active.softened`).
    """

    target: int = -1
    local_steps: LocalSteps = "one"
    strength: float = 1.0
    kind: ClassVar[str] = "fishing by class"

    def __post_init__(self) -> None:
        """Raise `UsageError` for a setting that cannot be used."""
        super().__post_init__()
        if not 0 < self.strength <= 1:
            raise UsageError(f"fishing.strength must lie in (0, 1], not {self.strength}")
        if self.strength < 1 and self.target < 0:
            raise UsageError("fishing.strength below 1 does not count the classes of a batch: pass fishing.target")
        if self.strength < 1 and (self.local_steps != "one" or self.single_out):
            raise UsageError("fishing.strength below 1 goes with fishing.local_steps=one and no fishing.single_out")

    def send(self, context: SendContext) -> Sending:
        """See `ActiveAttack.send`.

        Raises:
            UsageError: the model has no classifier that can be set, or no class `target`.
        """
        layer, head = self.classifier_of(context, least=-1)
        heads, classes = self.heads(context.history, layer), len(head.weight)
        target = self.target if self.target >= 0 else next_class(heads, classes)
        if self.local_steps != "one":
            anchor = _anchor(heads, classes, target)
            return Sending(held_model(context.model, context.image_shape, layer, target, anchor, self.local_steps))
        bias = head.bias.detach().double().clone()
        others = torch.cat([bias[:target], bias[target + 1 :]])
        bias[target] = others.min() - MARGIN
        direction = head.weight[target].detach().double()
        if not direction.any():  # a classifier that starts at zero
            direction = unit_direction(len(direction))
        whole = set_classifier(context, layer, target, direction, bias)
        if self.strength < 1:
            return Sending(softened(context.model, whole, f"{layer}.bias", target, self.strength))
        return self.counting(context, layer, whole)

    def head_of(self, observation: Observation) -> SetHead:
        """See `ClassifierAttack.head_of`."""
        if self.strength == 1:
            return super().head_of(observation)
        layer = find_head(observation.model, observation.image_shape)
        return softened_head(observation, layer, self.target, self.strength)

    def is_own(self, head: SetHead) -> bool:
        """See `ClassifierAttack.is_own`: the target's bias lies below the others'."""
        return _is_fished(head)

    def heads(self, history: Sequence[Observation], layer: str) -> list[tuple[SetHead, Tensor]]:
        """The earlier updates whose models were prepared, with their class counts (K,), oldest first."""
        found = []
        for observation in history:
            try:
                head = self.read_head(observation, layer)
            except UsageError:  # an honest round
                continue
            if _is_fished(head) and head.is_in(observation):
                found.append((head, head.class_counts(observation, self.local_steps == "adamw")))
        return found

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; one image.

        `details`: target (its class), senders (images of it in the batch, over all local steps; of AdamW 1 for any
        number) and, of one step or a held classifier, classes (held by the batch).
        """
        observation = observations[-1]
        head = self.head_of(observation)
        if self.strength < 1:
            return self._from_mixture(observation)
        details, labels = self.counted(head, observation)
        senders, alone = details["senders"], exact_channels(observation) if head.held else observation
        if senders < 1 or not alone.gradient_of(find_tokenizer(alone.model, alone.image_shape).weight).any():
            classes = [] if labels is None else labels.unique().tolist()
            held = f"; it holds the classes {_some(classes)}" if classes else ""
            return nobody(
                f"no image of class {head.row} is in the batch, so that no image sends a gradient{held}", details
            )
        found = self.read_alone(alone, alone.gradients)
        several = senders > observation.local_steps and not (head.held and self.single_out)  # counts all clients
        reason = f"{senders} images of class {head.row} send their gradients together (feature_fishing separates them)"
        polluted = hides_positions(observation) and not found.details.get("masked")
        reasons = (reason * several, POLLUTED * polluted, MOVED * head.moved(observation), found.diagnosis)
        diagnosis = "; ".join(filter(None, reasons))
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

    def counted(self, head: SetHead, observation: Observation) -> tuple[dict[str, float], Tensor | None]:
        """`details` of an update, and the labels of its images over all local steps; None where they are not counted.

        Steps of an adaptive optimiser show whether somebody sends, and not how many.
        """
        details: dict[str, float] = {"target": head.row}
        if observation.local_steps > 1 and not head.held:
            return details | {"senders": round(-head.row_gradient(observation)[1] * observation.num_examples)}, None
        adaptive = self.local_steps == "adamw"
        counts = head.class_counts(observation, adaptive)
        details |= {"senders": int(counts[head.row]), "classes": int((counts > 0).sum())}
        labels = torch.arange(len(counts)).repeat_interleave(counts.cpu())
        return details, None if adaptive else labels

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


def _is_fished(head: SetHead) -> bool:
    below = head.others(head.bias).max() if head.held else head.others(head.bias).min()
    return bool(head.bias[head.row] < below - MARGIN / 2)


def _anchor(heads: Sequence[tuple[SetHead, Tensor]], classes: int, target: int) -> int:
    """A class that the last prepared update did not hold, as far as it shows, besides `target`; see `held_model`."""
    counts = heads[-1][1].tolist() if heads else [0] * classes
    others = [(target + step) % classes for step in range(1, classes)]
    return min(others, key=lambda label: counts[label])


def _some(labels: Sequence[int], most: int = 8) -> str:
    """At most so many labels in words."""
    return ", ".join(map(str, labels[:most])) + (f" and {len(labels) - most} more" if len(labels) > most else "")
