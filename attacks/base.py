"""The attack interface and its registry.

A new attack is one file: a class with a keyword-only frozen configuration, `needs` (the capabilities it uses), and
`reconstruct(observations)`. A line in `attacks.ATTACKS`, or an entry point of another package, puts it into every
table.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import nn

from attacks.arithmetic import exact_arithmetic
from attacks.frozen import without_frozen
from attacks.observation import NEGLIGIBLE_NORM, SUPERVISED, Capability, Observation, Reconstruction, ThreatModel
from attacks.registry import UsageError
from attacks.tokenizer import SecondTable, find_tokenizer

T = TypeVar("T")

FAILED = "the attack failed"  # begins the diagnosis where an attack raised what it should not
# What asks for smaller batches (`attack_many`), and is no failure of an attack.
OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)
# A linear solve of 224-pixel images on one CPU core; smaller images take less in proportion.
SECONDS_OF_A_SOLVE, PIXELS_OF_A_SOLVE = 0.5, 3 * 224 * 224
# Below this one a saturated model, and no defence, may be what blunts an attack.
SMALL_NORM = 1e-5


class Interrupted(KeyboardInterrupt):
    """The user stopped an attack that works step by step.

    Attributes:
        found: a `Reconstruction` for each case, the best so far.
    """

    def __init__(self, found: list[Reconstruction]) -> None:
        super().__init__("an attack was interrupted")
        self.found = found


@dataclass(frozen=True, kw_only=True)
class Attack(ABC):
    """Base class: configuration in the dataclass fields, data in the call, the same checks before every attack."""

    needs: ClassVar[frozenset[Capability]] = frozenset()
    # Of these one is enough: the attack has a way for each.
    needs_one_of: ClassVar[frozenset[Capability]] = frozenset()
    # Whether the attack reads the whole update, and not just the layers that make the tokens and `linear_layers`.
    reads_every_parameter: ClassVar[bool] = False
    # Whether a suite that chooses by itself may run the attack; attacks that repeat others are run by name only.
    in_suite: ClassVar[bool] = True
    # Whether a suite gives the attack only what others leave of the budget: it tells less than they do.
    last_resort: ClassVar[bool] = False
    # Whether zeros tell the attack something; otherwise it is given updates without frozen parameters (`as_read`).
    reads_zeros: ClassVar[bool] = False
    # Updates of one client that the equations want; a protocol that may choose the number of rounds gives as many.
    updates_wanted: ClassVar[int] = 1

    def __call__(self, observations: Sequence[Observation]) -> Reconstruction:
        """Attack a sequence of updates of one client, oldest first.

        Returns:
            A `Reconstruction` of the last update's batch. An attack that cannot work answers with a diagnosis.

        Raises:
            ValueError: the sequence is empty, or a gradient holds NaN or infinity.
        """
        return self.attack_many([observations])[0]

    def attack_many(self, cases: Sequence[Sequence[Observation]]) -> list[Reconstruction]:
        """Attack many clients at once, each with its own sequence of updates; `seconds` is each one's equal share.

        An exception in the attack's code becomes the diagnosis of its case, and the other cases are attacked. Earlier
        updates that hold NaN or infinity are left out.

        Raises:
            ValueError: see `__call__`.
            MemoryError, torch.OutOfMemoryError: the cases do not fit the memory; fewer of them may.
        """
        started = time.perf_counter()
        cases = [[*(one for one in case[:-1] if math.isfinite(one.gradient_norm())), *case[-1:]] for case in cases]
        small = [("gradient_near_zero",) if case and case[-1].gradient_norm() < SMALL_NORM else () for case in cases]
        if not self.reads_every_parameter:
            cases = [[observation.legible() for observation in case] for case in cases]
        cases = [self.as_read(case) for case in cases]
        refused = [_refusal(case) or self.misfit(case) for case in cases]
        open_cases = [case for case, reason in zip(cases, refused, strict=True) if not reason]
        with torch.no_grad(), exact_arithmetic():
            found = iter(self._answers(open_cases) if open_cases else [])
        results = [Reconstruction(None, diagnosis=reason) if reason else _finite(next(found)) for reason in refused]
        share = (time.perf_counter() - started) / max(len(cases), 1)
        return [
            replace(result, seconds=share, flags=(*result.flags, *flags))
            for result, flags in zip(results, small, strict=True)
        ]

    def as_read(self, observations: Sequence[Observation]) -> Sequence[Observation]:
        """The updates as the attack is given them: without frozen parameters, but where it reads zeros."""
        return observations if self.reads_zeros else [without_frozen(observation) for observation in observations]

    @abstractmethod
    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """The attack itself, called under `torch.no_grad` with finite gradients that are not all zero.

        Raises:
            UsageError: it cannot work on this model or update at all; the message becomes the diagnosis. So does any
                other exception, with its name.
        """

    def reconstruct_many(self, cases: Sequence[Sequence[Observation]]) -> list[Reconstruction]:
        """The attack on several clients, for attacks that gain by a batch; one after the other unless overridden."""
        return [self._answer(case) for case in cases]

    def _answer(self, observations: Sequence[Observation]) -> Reconstruction:
        """What `reconstruct` finds, or why it fails."""
        found = _found_or_why_not(lambda: self.reconstruct(observations))
        return Reconstruction(images=None, diagnosis=found) if isinstance(found, str) else found

    def _answers(self, cases: Sequence[Sequence[Observation]]) -> list[Reconstruction]:
        """What `reconstruct_many` finds; where it fails on several cases, what it finds of each alone."""
        found = _found_or_why_not(lambda: self.reconstruct_many(cases))
        if not isinstance(found, str):
            return found
        if len(cases) == 1:
            return [Reconstruction(images=None, diagnosis=found)]
        return [self._answers([case])[0] for case in cases]

    def obstacle(self, observations: Sequence[Observation]) -> str:
        """Why the attack has nothing to add on these updates, or ""; read from the update in no time.

        A suite leaves the attack out and reports the reason. An attack that is run all the same finds out by itself.
        """
        return ""

    def misfit(self, observations: Sequence[Observation]) -> str:
        """Why the attack would simulate another client than the one that sent the last update, or ""."""
        objective = observations[-1].objective
        if not self.reads_every_parameter or objective == SUPERVISED:
            return ""
        return f"the attack simulates a client that minimises cross-entropy, and this one trains {objective}"

    def estimated_seconds(self, observations: Sequence[Observation]) -> float:
        """Time that the attack takes on these updates on one CPU core, within a factor of about three.

        A formula and no measurement, so that the same command runs the same attacks on every machine.
        """
        target = observations[-1]
        channels, height, width = target.image_shape
        return SECONDS_OF_A_SOLVE * channels * height * width / PIXELS_OF_A_SOLVE

    def linear_layers(self, model: nn.Module, width: int) -> tuple[str, ...]:
        """Weight matrices, by name, whose gradients the attack reads beside those of the layers that make the tokens.

        A benchmark computes no others. An attack that does not work on the model names none, and says why when called.

        Args:
            width: D, channels of a token.
        """
        return ()

    def remembered_layers(self, model: nn.Module, image_shape: tuple[int, int, int]) -> tuple[str, ...]:
        """Layers, by name, whose weights and gradients of earlier updates the attack reads beside those of the tokens.

        Args:
            image_shape: (C, H, W).
        """
        return ()

    def parameters(self) -> dict[str, Any]:
        """The configuration as plain values, for the results row."""
        return asdict(self)

    @classmethod
    def needs_in_words(cls) -> list[str]:
        """The capabilities that the attack needs, by name; "one or other" where one of several is enough."""
        ways = " or ".join(sorted(c.value for c in cls.needs_one_of))
        return sorted(c.value for c in cls.needs) + [ways] * bool(ways)

    def granted(self, threat_model: ThreatModel) -> Self:
        """The attack with what it makes of capabilities that it can use and does not need; itself by default."""
        return self

    def used(self) -> frozenset[Capability]:
        """The capabilities that the attack uses as it is configured; `needs` by default."""
        return self.needs

    def require(self, threat_model: ThreatModel, name: str) -> None:
        """Refuse to run under a threat model that grants less than the attack needs.

        Raises:
            UsageError: naming what is lacking.
        """
        lacking = threat_model.lacks(self.used())
        ways = threat_model.lacks(self.needs_one_of)
        if ways and len(ways) == len(self.needs_one_of):
            lacking.append(" or ".join(ways))
        if lacking:
            raise UsageError(
                f"attack {name!r} needs {', '.join(lacking)}, which the threat model does not grant (--grants)"
            )


def _found_or_why_not(work: Callable[[], T]) -> T | str:
    """What `work` returns, or a diagnosis where it raises; want of memory and interrupts are raised on."""
    try:
        return work()
    except UsageError as error:
        return str(error)
    except OUT_OF_MEMORY:
        raise
    except Exception as error:  # an attack may be anybody's code, and a run goes on without it
        logging.getLogger(__name__).debug("an attack failed", exc_info=True)
        return f"{FAILED}: {type(error).__name__}: {error}".splitlines()[0].rstrip(": ")


def _finite(found: Reconstruction) -> Reconstruction:
    """An answer without the images that hold NaN or infinity, which nothing can be compared with."""
    if found.images is None or torch.isfinite(found.images).all():
        return found
    whole = torch.isfinite(found.images).flatten(1).all(dim=1)
    lost, count = int((~whole).sum()), len(whole)
    what = "the images that were computed" if lost == count else f"{lost} of the {count} images that were computed"
    reason = "; ".join(filter(None, [f"{what} are not finite", found.diagnosis]))
    if lost == count:
        return replace(found, images=None, known=None, diagnosis=reason)
    images, known, labels = (
        None if values is None else values[whole.to(values.device)]
        for values in (found.images, found.known, found.labels)
    )
    return replace(found, images=images, known=known, labels=labels, diagnosis=reason)


def _refusal(observations: Sequence[Observation]) -> str:
    """Why the last update says nothing, or ""; raises on input that no attack can take."""
    if not observations:
        raise ValueError("an attack needs at least one observation")
    target = observations[-1]
    norm = target.gradient_norm()
    for name, gradient in target.gradients.items():
        if not gradient.is_floating_point():
            return (
                f"the gradient of {name} is of type {str(gradient.dtype).removeprefix('torch.')}: multiply quantised "
                "values by their scale and pass floating-point numbers"
            )
        if not math.isfinite(norm) and not torch.isfinite(gradient).all():
            raise ValueError(f"the gradient of {name} (client {target.client}, round {target.round}) is not finite")
    try:
        find_tokenizer(target.model, target.image_shape)
    except SecondTable as error:
        return str(error)
    except UsageError:  # no ViT; the attack says whether it minds
        pass
    if norm < NEGLIGIBLE_NORM:  # and zero, or for an attack that repeats the step
        return f"the gradient norm is {norm:.1e}: the update says nothing about the batch (a saturated model)"
    return ""
