"""Base class of the gradient-matching attacks: sets up the searches for the updates and returns the best images.

An attack is a `Recipe` of exchangeable parts. Victims that were sent the same model are attacked together. A *search*
is one restart for one victim; with V victims and R restarts that run in parallel there are L = V R searches.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from attacks import ATTACKS
from attacks.base import Attack, Interrupted
from attacks.gradient_matching.distances import Distance
from attacks.gradient_matching.engine import LoopSettings, OnStep, Outcome, minimise
from attacks.gradient_matching.evaluation import Candidates
from attacks.gradient_matching.gradients import Target
from attacks.gradient_matching.labels import head_bias, infer_labels, infer_one_label
from attacks.gradient_matching.matched_update import MatchedUpdate, extract_matched_update
from attacks.gradient_matching.optimisers import Optimiser
from attacks.gradient_matching.priors import Prior
from attacks.gradient_matching.simulation import build_simulation
from attacks.gradient_matching.unrolled import Simulation, math_attention
from attacks.observation import Capability, Observation, Reconstruction, ThreatModel
from attacks.registry import UsageError
from attacks.tokenizer import find_tokenizer

RANDOM, GREY = "randn", "zeros"
# Of one step on one CPU core, by tokens and parameters (0.1 s on vit_mini_32: 65 tokens, 2.7 million parameters).
SECONDS_OF_A_STEP, CONVOLUTIONAL_TOKENS = 0.1 / (65 * 2.7e6), 100
EXACT_COST = 2  # of exact derivatives, which random masks need, in units of those by finite differences
SCALE_UNKNOWN = (
    "the images found explain the update no better than a gradient of zero does (distance {:.3g} against {:.3g}): the "
    "search failed, or the scale of the update, which several images do not show, is not that of their mean loss "
    "(clipped, a summed loss); inverting_gradients does not depend on it"
)
ADDED = ("leave_out", "sent_only", "mask_draws")  # settings that came after rows were written


@dataclass(frozen=True)
class Recipe:
    """The parts of an attack.

    Attributes:
        distance: between simulated and received gradients.
        optimiser: with its learning-rate schedule.
        priors: on the images.
        clamps_pixels: clamp the pixels to [0, 1] after each step.
        optimises_labels: labels are optimised together with the images, not inferred.
    """

    distance: Distance
    optimiser: Optimiser
    priors: tuple[Prior, ...] = ()
    clamps_pixels: bool = True
    optimises_labels: bool = False


@dataclass(frozen=True)
class _MatchingLoss:
    """The loss that a recipe minimises for a group of victims; labels are (V, B), or None if they are optimised."""

    recipe: Recipe
    simulation: Simulation
    target: Target
    labels: Tensor | None

    def losses(self, candidates: Candidates, share: float) -> Tensor:
        """Losses (V, R), with the priors that are active at that share of the run."""
        victims, restarts = candidates.images.shape[:2]
        if self.labels is None:
            given = candidates.labels.softmax(dim=-1).flatten(0, 1)  # (L, B, K)
        else:
            given = self.labels[:, None].expand(-1, restarts, -1).flatten(0, 1)  # (L, B)
        with math_attention():
            found = self.target.matched(self.simulation.gradients(candidates.images.flatten(0, 1), given))
            losses = self.recipe.distance(found, self.target).unflatten(0, (victims, restarts))
            return losses + sum(prior(candidates.images) for prior in self.recipe.priors if share >= prior.active_from)

    def scale_doubts(self, outcome: Outcome) -> list[str]:
        """For every victim why the update's scale may be another than that of a mean loss, or "".

        Of one image the classifier's gradient shows the scale (`attacks.fingerprints`), of several nothing does.
        """
        victims = len(outcome.loss)
        if self.simulation.images == 1 or not self.recipe.distance.compares_sizes:
            return [""] * victims
        nothing = {name: sent.new_zeros(()).expand_as(sent) for name, sent in self.target.values.items()}
        without = self.recipe.distance(nothing, self.target).unflatten(0, (victims, -1))[:, 0]  # (V,)
        left = outcome.loss - sum(prior(outcome.best.images) for prior in self.recipe.priors)  # (V, R)
        pairs = zip(left.min(dim=1).values.tolist(), without.tolist(), strict=True)
        return [SCALE_UNKNOWN.format(own, zero) if own >= zero else "" for own, zero in pairs]


@dataclass(frozen=True, kw_only=True)
class GradientMatching(Attack):
    """Optimises images until their gradient equals the received one.

    Args:
        steps: number of gradient evaluations, at least 1.
        restarts: searches per victim, at least 1; the one of least loss gives the reconstruction.
        init: the initial images: randn (normalised pixels from a unit Gaussian), zeros (the mean of the normalisation),
            or the name of an attack whose reconstruction is refined.
        seed: of the initial images.
        patience: number of steps without improvement after which a search stops; 0 for never.
        gain: relative decrease of the loss that counts as an improvement.
        leave_out: beginnings of names of parameters whose gradients are not matched, joined by "+" (head.+bottleneck.),
            because a defence changes them; labels are still inferred from them.
        sent_only: match the entries that are not exactly zero, those that a client under top-k or a random mask sent.
        mask_draws: average the simulated gradient over so many random masks of the model's dropout and stochastic
            depth, drawn anew at each step; 0 simulates a client that drops nothing.
        on_step: called after each step with the steps done, the total steps, and the best loss (victims, restarts).
    """

    steps: int = 300
    restarts: int = 1
    init: str = RANDOM
    seed: int = 0
    patience: int = 0
    gain: float = 1e-3
    leave_out: str = ""
    sent_only: bool = False
    mask_draws: int = 0
    on_step: OnStep | None = field(default=None, repr=False, compare=False)

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MODEL_WEIGHTS})
    reads_every_parameter: ClassVar[bool] = True

    @abstractmethod
    def recipe(self, observation: Observation) -> Recipe:
        """The parts of the attack for this model and update.

        Raises:
            UsageError: the model or the update lacks something that a part needs.
        """

    def parameters(self) -> dict[str, Any]:
        """See `Attack.parameters`; without `on_step`, which does not affect the result, and without `ADDED` settings at
        their default, so that rows from before them stay rows of the same case."""
        usual = {f.name for f in fields(self) if f.name in ADDED and getattr(self, f.name) == f.default}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in usual | {"on_step"}}

    def validate(self) -> None:
        """Check the configuration.

        Raises:
            UsageError: fewer than one step or restart, a negative number of masks, an unknown `init`, or several
                restarts from the same start.
        """
        if self.mask_draws < 0:
            raise UsageError(f"mask_draws must not be negative, but is {self.mask_draws}")
        for name in ("steps", "restarts"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.init in (RANDOM, GREY):
            return
        if self.init not in ATTACKS or ATTACKS.get(self.init).reads_every_parameter:
            closed = [name for name, attack in ATTACKS.available().items() if not attack.reads_every_parameter]
            raise UsageError(f"unknown init {self.init!r}; choose from: {', '.join((RANDOM, GREY, *closed))}")
        if self.restarts > 1:
            raise UsageError(
                f"init {self.init!r} gives the same start every time: use restarts=1 instead of {self.restarts}"
            )

    def require(self, threat_model: ThreatModel, name: str) -> None:
        """See `Attack.require`; with another attack as `init`, that attack's capabilities are needed too."""
        self.validate()
        super().require(threat_model, name)
        if self.init not in (RANDOM, GREY):
            ATTACKS.get(self.init)().require(threat_model, self.init)

    def estimated_seconds(self, observations: Sequence[Observation]) -> float:
        """See `Attack.estimated_seconds`: steps, images, tokens and parameters."""
        target = observations[-1]
        parameters = sum(p.numel() for p in target.model.parameters())
        try:
            tokens = find_tokenizer(target.model, target.image_shape).num_patches + 1
        except UsageError:  # a convolutional network uses each weight at many places
            tokens = CONVOLUTIONAL_TOKENS
        images = target.num_examples * target.local_steps
        masks = EXACT_COST * self.mask_draws or 1
        return SECONDS_OF_A_STEP * self.steps * self.restarts * images * tokens * parameters * masks

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; `details` holds the losses (least, first, last) and the number of steps."""
        return self.reconstruct_many([observations])[0]

    def reconstruct_many(self, cases: Sequence[Sequence[Observation]]) -> list[Reconstruction]:
        """See `Attack.reconstruct_many`: victims of one model together, or one by one if the optimiser requires it.

        Raises:
            UsageError: see `validate`.
            Interrupted: by the user, with the best reconstructions so far.
        """
        self.validate()
        found: dict[int, Reconstruction] = {}
        for members in self._groups(cases):
            try:
                results, interrupted = self._attack_group([cases[i] for i in members])
            except UsageError as error:
                results, interrupted = [Reconstruction(images=None, diagnosis=str(error))] * len(members), False
            found |= zip(members, results, strict=True)
            if interrupted:
                skipped = Reconstruction(images=None, diagnosis="not attacked, because the run was interrupted")
                raise Interrupted([found.get(i, skipped) for i in range(len(cases))])
        return [found[i] for i in range(len(cases))]

    def _groups(self, cases: Sequence[Sequence[Observation]]) -> list[list[int]]:
        groups: dict[tuple, list[int]] = defaultdict(list)
        for index, case in enumerate(cases):
            o = case[-1]
            # A victim is attacked alone if it has several restarts (memory), if the initial attack may fail for some
            # victims, or if the optimiser or the random masks would mix the searches.
            mixes = self.mask_draws or not self._separable(o)
            alone = index if self.restarts > 1 or self.init not in (RANDOM, GREY) or mixes else -1
            content = tuple(sorted(o.gradients)), o.all_labels() is None
            key = id(o.model), o.image_shape, o.num_examples, o.kind, o.local_steps, o.learning_rate, content, alone
            groups[key].append(index)
        return list(groups.values())

    def _separable(self, observation: Observation) -> bool:
        try:
            return self.recipe(observation).optimiser.separable
        except UsageError:
            return True

    def _attack_group(self, cases: Sequence[Sequence[Observation]]) -> tuple[list[Reconstruction], bool]:
        """Reconstructions for victims of one model, and whether the user stopped the run."""
        observations = [case[-1] for case in cases]
        recipe = self.recipe(observations[0])
        updates = [extract_matched_update(o).without(self.leave_out) for o in observations]
        # Restarts that cannot share an optimiser run one after the other.
        parallel = self.restarts if recipe.optimiser.separable else 1
        exact = recipe.optimises_labels or recipe.optimiser.exact
        masks = {"mask_draws": self.mask_draws, "seed": self.seed}
        simulation, target = build_simulation(observations[0], updates, parallel, exact=exact, **masks)
        target = target.of_sent() if self.sent_only else target
        labels = None if recipe.optimises_labels else self._labels(observations, simulation)
        loss = _MatchingLoss(recipe, simulation, target, labels)
        changes = tuple({prior.active_from for prior in recipe.priors})
        settings = LoopSettings(self.steps, self.patience, self.gain, self.seed, changes, replays=not self.mask_draws)
        clamp = _pixel_clamp(observations[0]) if recipe.clamps_pixels else None
        outcomes: list[Outcome] = []
        for first in range(0, self.restarts, parallel):
            start = self._initial(cases, simulation, recipe, slice(first, first + parallel))
            outcomes.append(minimise(loss.losses, start, recipe.optimiser, settings, clamp, self.on_step))
            if outcomes[-1].interrupted:
                break
        merged = _merge(outcomes)
        victims = enumerate(zip(observations, updates, loss.scale_doubts(merged), strict=True))
        found = [self._reconstruction(index, merged, o, u, labels, doubt) for index, (o, u, doubt) in victims]
        return found, merged.interrupted

    def _labels(self, observations: Sequence[Observation], simulation: Simulation) -> Tensor:
        """Labels (V, B) int64 of all local steps: those of the observations where all are given, else inferred."""
        grey = torch.zeros(1, *observations[0].image_shape).to(next(iter(simulation.weights.values())))
        expected = simulation.logits(simulation.weights, grey, None).softmax(dim=1)[0]  # (K,)
        rows = []
        for o in observations:
            given = o.all_labels()
            if given is not None:
                rows.append(given.to(grey.device))
                continue
            if simulation.images == 1 and (self.sent_only or f"{simulation.head}.bias" not in o.gradients):
                rows.append(infer_one_label(o.gradients, simulation.head))
            else:
                bias = head_bias(o.gradients, simulation.head)
                rows.append(infer_labels(bias, expected.to(bias), simulation.images, o.local_steps))
        return torch.stack(rows)

    def _initial(
        self, cases: Sequence[Sequence[Observation]], simulation: Simulation, recipe: Recipe, restarts: slice
    ) -> Candidates:
        """The initial candidates of some restarts; a victim's do not depend on the other victims."""
        like = next(iter(simulation.weights.values()))
        shape = (simulation.images, *cases[0][-1].image_shape)
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randn(self.restarts, *shape, generator=generator)[restarts].to(like)  # (R, B, C, H, W)
        if self.init == RANDOM:
            images = drawn.expand(len(cases), *drawn.shape)
        elif self.init == GREY:
            images = torch.zeros_like(drawn).expand(len(cases), *drawn.shape)
        else:
            images = torch.stack([_initial_images(self.init, case, simulation.images) for case in cases])[:, None]
            images = images.to(like)
        if not recipe.optimises_labels:
            return Candidates(images)
        classes = simulation.logits(simulation.weights, torch.zeros(1, *shape[1:]).to(like), None).shape[1]
        labels = torch.randn(self.restarts, simulation.images, classes, generator=generator)[restarts].to(like)
        return Candidates(images, labels.expand(len(cases), *labels.shape))

    def _reconstruction(
        self,
        index: int,
        outcome: Outcome,
        observation: Observation,
        update: MatchedUpdate,
        labels: Tensor | None,
        doubt: str,
    ) -> Reconstruction:
        """The best restart of victim `index`, with its diagnosis, of which `doubt` is part, and flags."""
        winner = int(outcome.loss[index].nan_to_num(nan=torch.inf).argmin())
        numbers = (outcome.start, outcome.limit, outcome.last, outcome.loss)
        start, limit, last, loss = (float(t[index, winner]) for t in numbers)
        flags = list(update.flags)
        if observation.all_labels() is not None and labels is not None:
            flags.append("labels_given")
        reasons = [doubt] if doubt else []
        if not last <= limit:
            flags.append("loss_above_start")
            reasons.append(f"the last loss {last:.3g} is above the initial loss {limit:.3g}: the search diverged")
        if "zero_rows_ignored" in flags and not self.sent_only:
            reasons.append("masked positions cannot be simulated: the model takes no mask")
        if outcome.interrupted:
            reasons.append(f"interrupted after {len(outcome.trace)} of {self.steps} steps")
        images = observation.to_pixels(outcome.best.images[index, winner]).float()
        found = labels[index] if labels is not None else outcome.best.labels[index, winner].argmax(dim=-1)
        return Reconstruction(
            images=images,
            known=torch.zeros_like(images[:, :1], dtype=torch.bool),  # a minimum of the loss proves no pixel correct
            labels=found,
            diagnosis="; ".join(reasons),
            flags=tuple(flags),
            details={"loss": loss, "start_loss": start, "last_loss": last, "steps": len(outcome.trace)},
        )


def _merge(outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome of restarts that ran one after the other; the trace is that of the longest run."""
    if len(outcomes) == 1:
        return outcomes[0]
    images = torch.cat([o.best.images for o in outcomes], dim=1)
    labels = None if outcomes[0].best.labels is None else torch.cat([o.best.labels for o in outcomes], dim=1)
    loss, start, limit, last = (
        torch.cat([getattr(o, name) for o in outcomes], dim=1) for name in ("loss", "start", "limit", "last")
    )
    trace = max((o.trace for o in outcomes), key=len)
    return Outcome(Candidates(images, labels), loss, start, limit, last, trace, any(o.interrupted for o in outcomes))


def _initial_images(name: str, case: Sequence[Observation], count: int) -> Tensor:
    """The reconstruction by attack `name`, normalised, (count, C, H, W).

    Where it gives fewer images, as of one of several local steps' batches, they are repeated in turn.

    Raises:
        UsageError: the attack gave no images.
    """
    found, observation = ATTACKS.get(name)()(case), case[-1]
    if found.images is None:
        raise UsageError(f"no initial images, because {name} failed: {found.diagnosis}")
    mean, std = (torch.tensor(v).view(1, -1, 1, 1).to(found.images) for v in (observation.mean, observation.std))
    normalised = (found.images - mean) / std
    return normalised[torch.arange(count) % len(normalised)]


def _pixel_clamp(observation: Observation) -> Callable[[Tensor], Tensor]:
    """A function that clamps normalised images (..., C, H, W) so that their pixels lie in [0, 1]."""

    def clamp(images: Tensor) -> Tensor:
        """Images whose pixels, once back on their scale, lie in [0, 1]."""
        mean, std = (torch.tensor(v).view(-1, 1, 1).to(images) for v in (observation.mean, observation.std))
        return torch.maximum(torch.minimum(images, (1 - mean) / std), -mean / std)

    return clamp
