"""What the named attacks share: from updates to lanes, from lanes to images.

An attack is a `Recipe` of exchangeable parts. Victims that were sent the same model are attacked together.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from attacks import ATTACKS
from attacks.base import Attack, Interrupted
from attacks.gradient_matching.distances import Distance
from attacks.gradient_matching.engine import Candidates, OnStep, Outcome, Rules, minimise
from attacks.gradient_matching.gradients import Target
from attacks.gradient_matching.labels import head_bias, infer_labels
from attacks.gradient_matching.optimisers import Optimiser
from attacks.gradient_matching.priors import Prior
from attacks.gradient_matching.reading import Reading, read
from attacks.gradient_matching.simulation import simulate
from attacks.gradient_matching.unrolled import Simulation, math_attention
from attacks.observation import Capability, Observation, Reconstruction, ThreatModel
from attacks.registry import UsageError

RANDOM, GREY = "randn", "zeros"


@dataclass(frozen=True)
class Recipe:
    """The parts of an attack.

    Attributes:
        distance: between gradients.
        optimiser: with its schedule.
        priors: on the images.
        boxed: keep pixels in [0, 1].
        seeks_labels: labels are sought with the images, not inferred.
    """

    distance: Distance
    optimiser: Optimiser
    priors: tuple[Prior, ...] = ()
    boxed: bool = True
    seeks_labels: bool = False


@dataclass(frozen=True)
class _Search:
    """What a recipe minimises for some victims; labels are (V, B), or None where they are sought."""

    recipe: Recipe
    simulation: Simulation
    target: Target
    labels: Tensor | None

    def losses(self, candidates: Candidates, share: float) -> Tensor:
        """(V, R), with the priors that have begun at that share of the run."""
        victims, restarts = candidates.images.shape[:2]
        if self.labels is None:
            given = candidates.labels.softmax(dim=-1).flatten(0, 1)  # (L, B, K)
        else:
            given = self.labels[:, None].expand(-1, restarts, -1).flatten(0, 1)  # (L, B)
        with math_attention():
            found = self.simulation.gradients(candidates.images.flatten(0, 1), given)
            losses = self.recipe.distance(found, self.target).unflatten(0, (victims, restarts))
            return losses + sum(prior(candidates.images) for prior in self.recipe.priors if share >= prior.begins)


@dataclass(frozen=True, kw_only=True)
class GradientMatching(Attack):
    """Images whose gradient is the one received.

    Args:
        steps: gradient evaluations.
        restarts: starts a victim; the one of least loss is the answer.
        init: where to start: randn (normalised pixels from a unit Gaussian), zeros (the mean of the normalisation), or
            the name of an attack whose answer is refined.
        seed: of the starts.
        patience: steps without gain after which a start is given up; 0 for never.
        gain: relative fall of the loss that counts as one.
        on_step: told of progress: steps done, steps asked for, and the best loss (victims, restarts).
    """

    steps: int = 300
    restarts: int = 1
    init: str = RANDOM
    seed: int = 0
    patience: int = 0
    gain: float = 1e-3
    on_step: OnStep | None = field(default=None, repr=False, compare=False)

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MODEL_WEIGHTS})
    reads_every_parameter: ClassVar[bool] = True

    @abstractmethod
    def recipe(self, observation: Observation) -> Recipe:
        """The parts, for this model.

        Raises:
            UsageError: the model or the update lacks what a part speaks of.
        """

    def parameters(self) -> dict[str, Any]:
        """See `Attack.parameters`; progress is nobody's result."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "on_step"}

    def validate(self) -> None:
        """Raise `UsageError` for a configuration that means nothing."""
        for name in ("steps", "restarts"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.init in (RANDOM, GREY):
            return
        if self.init not in ATTACKS or ATTACKS.get(self.init).reads_every_parameter:
            closed = [name for name, attack in ATTACKS.available().items() if not attack.reads_every_parameter]
            raise UsageError(f"unknown start {self.init!r}; choose from: {', '.join((RANDOM, GREY, *closed))}")
        if self.restarts > 1:
            raise UsageError(f"start {self.init!r} is always the same: it makes no sense with {self.restarts} restarts")

    def require(self, threat_model: ThreatModel, name: str) -> None:
        """See `Attack.require`; a start from another attack needs what that one needs."""
        self.validate()
        super().require(threat_model, name)
        if self.init not in (RANDOM, GREY):
            ATTACKS.get(self.init)().require(threat_model, self.init)

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; `details` holds losses and steps."""
        return self.reconstruct_many([observations])[0]

    def reconstruct_many(self, cases: Sequence[Sequence[Observation]]) -> list[Reconstruction]:
        """See `Attack.reconstruct_many`: victims of one model together, one by one where the optimiser asks for it.

        Raises:
            Interrupted: by the user, with what was found so far.
        """
        self.validate()
        found: dict[int, Reconstruction] = {}
        for members in self._groups(cases):
            try:
                answers, interrupted = self._together([cases[i] for i in members])
            except UsageError as error:
                answers, interrupted = [Reconstruction(images=None, diagnosis=str(error))] * len(members), False
            found |= zip(members, answers, strict=True)
            if interrupted:
                untouched = Reconstruction(images=None, diagnosis="interrupted before its turn")
                raise Interrupted([found.get(i, untouched) for i in range(len(cases))])
        return [found[i] for i in range(len(cases))]

    def _groups(self, cases: Sequence[Sequence[Observation]]) -> list[list[int]]:
        groups: dict[tuple, list[int]] = defaultdict(list)
        for index, case in enumerate(cases):
            o = case[-1]
            # Memory for one victim's restarts; an optimiser that mixes lanes; a start that may fail for one of them.
            alone = index if self.restarts > 1 or self.init not in (RANDOM, GREY) or not self._separable(o) else -1
            alike = tuple(sorted(o.gradients)), o.labels is None
            key = id(o.model), o.image_shape, o.num_examples, o.kind, o.local_steps, o.learning_rate, alike, alone
            groups[key].append(index)
        return list(groups.values())

    def _separable(self, observation: Observation) -> bool:
        try:
            return self.recipe(observation).optimiser.separable
        except UsageError:
            return True

    def _together(self, cases: Sequence[Sequence[Observation]]) -> tuple[list[Reconstruction], bool]:
        """Answers to victims of one model, and whether the user stopped the search."""
        observations = [case[-1] for case in cases]
        recipe = self.recipe(observations[0])
        readings = [read(o) for o in observations]
        # Restarts that cannot share an optimiser run one after the other.
        lanes = self.restarts if recipe.optimiser.separable else 1
        exact = recipe.seeks_labels or recipe.optimiser.exact
        simulation, target = simulate(observations[0], readings, lanes, exact=exact)
        labels = None if recipe.seeks_labels else self._labels(observations, simulation)
        search = _Search(recipe, simulation, target, labels)
        rules = Rules(self.steps, self.patience, self.gain, self.seed, tuple({prior.begins for prior in recipe.priors}))
        box = _box(observations[0]) if recipe.boxed else None
        outcomes: list[Outcome] = []
        for first in range(0, self.restarts, lanes):
            start = self._start(cases, simulation, recipe, slice(first, first + lanes))
            outcomes.append(minimise(search.losses, start, recipe.optimiser, rules, box, self.on_step))
            if outcomes[-1].interrupted:
                break
        merged = _merge(outcomes)
        pairs = enumerate(zip(observations, readings, strict=True))
        return [self._answer_of(index, merged, o, r, labels) for index, (o, r) in pairs], merged.interrupted

    def _labels(self, observations: Sequence[Observation], simulation: Simulation) -> Tensor:
        """(V, B), given or inferred."""
        grey = torch.zeros(1, *observations[0].image_shape).to(next(iter(simulation.weights.values())))
        expected = simulation.logits(simulation.weights, grey, None).softmax(dim=1)[0]  # (K,)
        rows = []
        for o in observations:
            if o.labels is not None:
                rows.append(o.labels.to(grey.device).repeat(o.local_steps))
                continue
            bias = head_bias(o.gradients, simulation.head)
            rows.append(infer_labels(bias, expected.to(bias), simulation.images, o.local_steps))
        return torch.stack(rows)

    def _start(
        self, cases: Sequence[Sequence[Observation]], simulation: Simulation, recipe: Recipe, restarts: slice
    ) -> Candidates:
        """The candidates of some restarts; a victim's do not depend on its company."""
        like = next(iter(simulation.weights.values()))
        shape = (simulation.images, *cases[0][-1].image_shape)
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randn(self.restarts, *shape, generator=generator)[restarts].to(like)  # (R, B, C, H, W)
        if self.init == RANDOM:
            images = drawn.expand(len(cases), *drawn.shape)
        elif self.init == GREY:
            images = torch.zeros_like(drawn).expand(len(cases), *drawn.shape)
        else:
            images = torch.stack([_answer_to_refine(self.init, case, simulation.images) for case in cases])[:, None]
            images = images.to(like)
        if not recipe.seeks_labels:
            return Candidates(images)
        classes = simulation.logits(simulation.weights, torch.zeros(1, *shape[1:]).to(like), None).shape[1]
        labels = torch.randn(self.restarts, simulation.images, classes, generator=generator)[restarts].to(like)
        return Candidates(images, labels.expand(len(cases), *labels.shape))

    def _answer_of(
        self, index: int, outcome: Outcome, observation: Observation, reading: Reading, labels: Tensor | None
    ) -> Reconstruction:
        """The best restart of one victim, in words and pixels."""
        winner = int(outcome.loss[index].nan_to_num(nan=torch.inf).argmin())
        numbers = (outcome.start, outcome.limit, outcome.last, outcome.loss)
        start, limit, last, loss = (float(t[index, winner]) for t in numbers)
        flags = list(reading.flags)
        if observation.labels is not None and labels is not None:
            flags.append("labels_given")
        reasons = []
        if not last <= limit:
            flags.append("loss_above_start")
            reasons.append(f"the loss ended at {last:.3g}, above its start {limit:.3g}: the search diverged")
        if "zero_rows_ignored" in flags:
            reasons.append("masked positions cannot be simulated: the model takes no mask")
        if outcome.interrupted:
            reasons.append(f"interrupted after {len(outcome.trace)} of {self.steps} steps")
        images = observation.to_pixels(outcome.best.images[index, winner]).float()
        found = labels[index] if labels is not None else outcome.best.labels[index, winner].argmax(dim=-1)
        return Reconstruction(
            images=images,
            known=torch.zeros_like(images[:, :1], dtype=torch.bool),  # a minimum vouches for no pixel
            labels=found,
            diagnosis="; ".join(reasons),
            flags=tuple(flags),
            details={"loss": loss, "start_loss": start, "last_loss": last, "steps": len(outcome.trace)},
        )


def _merge(outcomes: Sequence[Outcome]) -> Outcome:
    """Restarts that ran one after the other, side by side; the trace is that of the longest."""
    if len(outcomes) == 1:
        return outcomes[0]
    images = torch.cat([o.best.images for o in outcomes], dim=1)
    labels = None if outcomes[0].best.labels is None else torch.cat([o.best.labels for o in outcomes], dim=1)
    loss, start, limit, last = (
        torch.cat([getattr(o, name) for o in outcomes], dim=1) for name in ("loss", "start", "limit", "last")
    )
    trace = max((o.trace for o in outcomes), key=len)
    return Outcome(Candidates(images, labels), loss, start, limit, last, trace, any(o.interrupted for o in outcomes))


def _answer_to_refine(name: str, case: Sequence[Observation], count: int) -> Tensor:
    """Another attack's answer, normalised, (count, C, H, W).

    Raises:
        UsageError: it gave none.
    """
    found, observation = ATTACKS.get(name)()(case), case[-1]
    if found.images is None:
        raise UsageError(f"nothing to start from, {name} says: {found.diagnosis}")
    mean, std = (torch.tensor(v).view(1, -1, 1, 1).to(found.images) for v in (observation.mean, observation.std))
    normalised = (found.images - mean) / std
    return normalised if len(normalised) == count else normalised[:1].expand(count, -1, -1, -1)


def _box(observation: Observation):
    """Clamp normalised images (..., C, H, W) to what pixels in [0, 1] become."""

    def project(images: Tensor) -> Tensor:
        mean, std = (torch.tensor(v).view(-1, 1, 1).to(images) for v in (observation.mean, observation.std))
        return torch.maximum(torch.minimum(images, (1 - mean) / std), -mean / std)

    return project
