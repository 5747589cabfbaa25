"""Updates that are not the gradient of one step: what was done to them, read from the numbers alone.

The attacks take an update for the gradient of a classification loss. What clients send instead leaves marks that an
honest float32 gradient does not have:

*Adaptive steps* (Adam, RMSprop, Adagrad, signs). Dividing by a running norm makes all entries of one size. An honest
gradient's largest entry is 20 to 500 times its rms, that of eight steps of Adam 2 times (on five ViTs and a ResNet).
After many steps that is no longer so, but sums that vanish for every sum of gradients (`attacks.identities`) are broken
by more than noise could: as if by noise of two sizes, one of them above the rms of the update (1.8 to 4 times after 20,
60 and 100 steps of Adam, RMSprop and Adagrad on two ViTs).

*Weight decay* (update = gradient + lambda w). Sums that vanish for a gradient (`attacks.identities`) are lambda times
the same sums of the weights: D equations for one number. It is subtracted where the fit is clean. Position embeddings
and biases are often exempt: of the four possibilities the one is taken for which the position rows agree best with the
bias of the patch projection (`attacks.linear.position_rows`).

*Added noise* breaks both identities by the same standard deviation; where they are not both at hand, the rest of the
linear system (`attacks.linear.least_squares`) gives a second estimate.

*Clipping*: a norm that is a round number. *Half precision, int8, sparsification*: `attacks.compression`.

*Several steps, another scale*: the classifier's gradient has a rank above the number of images (`attacks.classifier`);
for one image it gives the scale, with which the update is put right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from attacks.classifier import Step, read_step
from attacks.compression import LEAST_ENTRIES, find_precision, find_sparsification
from attacks.findings import Finding
from attacks.identities import Identity, classifier_sums, position_balance, rms, tokenizer_of
from attacks.linear.grids import sample
from attacks.linear.masked_update import solve_masked
from attacks.linear.position_rows import read_position_rows, remove_localisation
from attacks.observation import NEGLIGIBLE_NORM, Observation
from attacks.registry import UsageError

# Entries count as equal when they differ from the median by less; at least MOST of them after one step of Adam.
EQUAL, MOST = 0.02, 0.9
# Largest entry in units of the rms, and ratio of the parameters' rms, below which steps are adaptive.
EVEN_PEAK, EVEN_SPREAD = 3.5, 2.0
# Share of a broken identity that a clean fit may leave.
CLEAN = 0.1
# A row is weight decay alone when nothing beyond this many units of round-off points elsewhere.
ROUND_OFF_UNITS = 4.0
# Largest ratio of two estimates of the same noise.
AGREEING = 1.6
ADVICE = "send the gradient itself, or weights after plain SGD"
# Relative distance from a round number.
ROUND = 1e-5
# Relative distance of the classifier's scale from 1 that half precision explains.
SCALED = 1e-2
# Relative error of the classifier's gradient in half precision or eight bits, at most.
COARSE = 2e-2


NO_CROSS_ENTROPY = "sums over classes that vanish for the gradient of a softmax cross-entropy do not: the client has"
ANOTHER_LOSS = Finding(
    "another_loss",
    f"{NO_CROSS_ENTROPY} another loss, or a defence on the classifier; attacks that simulate the client assume "
    "cross-entropy, so that what they miss shows nothing",
    changes=0.0,
)


def recognise(observation: Observation) -> list[Finding]:
    """What is unusual about an update; empty for the float32 gradient of a cross-entropy, and for one that vanishes."""
    if observation.gradient_norm() < NEGLIGIBLE_NORM:
        return []
    return [finding for finding in _findings(observation) if finding is not None]


def repair(observation: Observation) -> tuple[Observation, list[Finding]]:
    """The update without weight decay and at the scale of one step, as far as it shows them, and what is unusual."""
    observation = _in_full(observation)
    found = recognise(observation)
    if any(finding.name in ("adaptive_steps", "second_moments") for finding in found):
        return observation, found
    decay = find_weight_decay(observation)
    if decay is not None:
        observation = remove_weight_decay(observation, decay)
        removed = Finding(
            "weight_decay",
            f"the update contains the weights times {decay:.2g} (weight decay); they were known and were subtracted",
            fixed=True,
        )
        found = [removed, *(finding for finding in recognise(observation) if finding.name != "weight_decay")]
    return _rescaled(observation, _scale(observation, read_step(observation))), found


def repaired(observation: Observation) -> Observation:
    """The update that `repair` gives, without looking for what it does not change: a third of the time."""
    observation = _in_full(observation)
    values = _values(observation)
    says_something = observation.gradient_norm() >= NEGLIGIBLE_NORM and _has_statistics(values)
    if says_something and _adaptive_steps(values) is not None:
        return observation
    decay = find_weight_decay(observation)
    observation = observation if decay is None else remove_weight_decay(observation, decay)
    return _rescaled(observation, _scale(observation, read_step(observation)))


def scaled_loss(factor: float) -> Finding:
    """A gradient that is `factor` times that of the mean cross-entropy."""
    sentence = (
        f"the gradient is {factor:.4g} times that of the mean cross-entropy (a summed or scaled loss): no hindrance"
    )
    return Finding("scaled_loss", sentence, fixed=True)


def _findings(observation: Observation) -> Iterator[Finding | None]:
    values = _values(observation)
    if not _has_statistics(values):
        return
    adaptive = _adaptive_steps(values)
    yield adaptive
    precision = find_precision(observation, values)
    yield precision
    clipping = _clipping(observation)
    yield clipping
    if adaptive is not None:
        return
    decay = find_weight_decay(observation)
    if decay is not None:
        yield Finding("weight_decay", f"the update contains the weights times {decay:.2g} (weight decay)", hinders=True)
    sparse = find_sparsification(observation, values) if precision is None else None
    yield sparse
    if sparse is not None or decay is not None:
        return
    beside = (_noise(observation) or _broken_sums(observation)) if precision is None else None
    yield beside
    if beside is None or not beside.hinders:
        yield _step(observation, COARSE if precision else 0.0, clipped=clipping is not None)


def _values(observation: Observation) -> dict[str, Tensor]:
    """The gradients that are not zero, by name."""
    return {n: g.detach() for n, g in observation.gradients.items() if g.is_floating_point() and g.any()}


def _has_statistics(values: Mapping[str, Tensor]) -> bool:
    return sum(g.numel() for g in values.values()) >= LEAST_ENTRIES


def _in_full(observation: Observation) -> Observation:
    return replace(observation, gradients={n: _full(g) for n, g in observation.gradients.items()})


def _full(gradient: Tensor) -> Tensor:
    """Half-precision numbers as float32, others as they are."""
    return gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient


def _adaptive_steps(values: Mapping[str, Tensor]) -> Finding | None:
    sampled = torch.cat([sample(g).float() for g in values.values()])
    sizes = sampled[sampled != 0].abs()
    if all(bool((g >= 0).all()) for g in values.values()):
        return Finding(
            "second_moments",
            "no entry is negative: these are squares, such as the second moments of Adam, and no gradient; the signs "
            f"are lost ({ADVICE})",
            hinders=True,
        )
    equal = float(((sizes / sizes.median() - 1).abs() < EQUAL).float().mean())
    if equal > MOST:
        return Finding(
            "adaptive_steps",
            f"{equal:.0%} of the entries have the same magnitude: this is the first step of Adam, AdamW or a sign "
            f"optimiser, which keeps little but the signs of the gradient ({ADVICE})",
            hinders=True,
        )
    rms = torch.stack([g.float().square().mean().sqrt() for g in values.values() if g.numel() >= 64] or [sizes.mean()])
    peak = max(float(g.abs().max()) for g in values.values()) / float(sampled.square().mean().sqrt())
    spread = float(torch.quantile(rms, 0.9) / torch.quantile(rms, 0.1))
    if peak < EVEN_PEAK and spread < EVEN_SPREAD and len(sizes) > 10 * LEAST_ENTRIES:
        return Finding(
            "adaptive_steps",
            f"the largest entry is {peak:.1f} times the rms and all parameters have the same rms: these are steps of "
            f"an adaptive optimiser (Adam, RMSprop, Adagrad), and no gradient ({ADVICE})",
            hinders=True,
        )
    return None


def _clipping(observation: Observation) -> Finding | None:
    norm = observation.gradient_norm()
    if not 1e-3 < norm < 1e3:
        return None
    nearest = min((float(f"{norm:.0e}"), 1.5, 2.5), key=lambda number: abs(number - norm))
    if abs(norm / nearest - 1) > ROUND:
        return None
    return Finding(
        "clipping",
        f"the norm of the update is {nearest:g}: it was clipped to that; the common factor does not hinder "
        "closed forms",
        fixed=True,
    )


def _noise(observation: Observation) -> Finding | None:
    classes = classifier_sums(observation)
    # Noise in every entry breaks the classifier's sums too; and it hides the mask that a localisation loss depends on.
    noisy = classes is not None and classes.is_broken()
    identities = (classes, position_balance(observation) if noisy else _balance_without_localisation(observation))
    levels = [identity.noise() for identity in identities if identity is not None and identity.is_broken()]
    if not levels:
        return None
    rest = _rest_of_system(observation) if len(levels) < 2 else None
    levels = sorted([*levels, rest] if rest is not None else levels)
    if len(levels) < 2 or not levels[-1] < AGREEING * levels[0]:
        return None
    level, rms = (levels[0] * levels[-1]) ** 0.5, _rms_of(observation)
    return Finding(
        "noise",
        f"noise of standard deviation {level:.1e} was added to every entry of the update, whose rms is {rms:.1e}; a "
        "reconstruction above the guesses is a leak all the same, and a failed one shows that the noise holds against "
        "these attacks only",
        changes=AGREEING**2 * level / rms,
    )


def _broken_sums(observation: Observation) -> Finding | None:
    """Sums that vanish for every sum of gradients, broken by something that is neither noise nor weight decay."""
    classes, places = classifier_sums(observation), position_balance(observation)
    if classes is None or not classes.is_broken():
        return None
    if places is None:
        return Finding(
            "unknown_optimiser",
            f"{NO_CROSS_ENTROPY} another loss, or an adaptive optimiser (Adam); plain SGD is assumed, because without "
            "trained positions the update does not show which",
        )
    largest = max(classes.noise(), places.noise())
    if not places.is_broken():
        return ANOTHER_LOSS
    if largest < AGREEING * min(classes.noise(), places.noise()):
        return None  # noise
    if largest < AGREEING * _rms_of(observation) or _explained_by_localisation(observation):
        return None
    return Finding(
        "adaptive_steps",
        "sums that vanish for every sum of gradients are as large as the update itself: these are many steps of an "
        f"adaptive optimiser (Adam, RMSprop, Adagrad), and no gradient ({ADVICE})",
        hinders=True,
    )


def _explained_by_localisation(observation: Observation) -> bool:
    """Whether the position rows balance once a localisation loss is subtracted."""
    tokenizer = tokenizer_of(observation)
    rows = tokenizer.position_rows(observation.gradients)[tokenizer.prefix :]
    return remove_localisation(observation, tokenizer, rows)[3] < CLEAN


def _balance_without_localisation(observation: Observation) -> Identity | None:
    """`position_balance`, of which what a localisation loss adds to the rows is left out: it is no noise."""
    balance, tokenizer = position_balance(observation), tokenizer_of(observation)
    if balance is None or not balance.is_broken() or tokenizer.localisation is None:
        return balance
    rows = tokenizer.position_rows(observation.gradients)[tokenizer.prefix :]
    imbalance = remove_localisation(observation, tokenizer, rows)[3]
    if not math.isfinite(imbalance):
        return balance
    bias = observation.gradients[tokenizer.bias].double()
    return replace(balance, of_update=torch.full_like(balance.of_update, imbalance * float(rms(bias))))


def _rms_of(observation: Observation) -> float:
    """Root mean square of all entries of the update."""
    return observation.gradient_norm() / sum(g.numel() for g in observation.gradients.values()) ** 0.5


def _rest_of_system(observation: Observation) -> float | None:
    """Noise of the linear system of one image and one step; None where it has no spare rows to show it."""
    try:
        rows = read_position_rows(observation)
    except UsageError:
        return None
    spare = rows.tokenizer.width - rows.tokenizer.num_patches
    if observation.num_examples > 1 or observation.local_steps > 1 or spare <= 0:
        return None
    return solve_masked(rows).noise


def _step(observation: Observation, error: float, clipped: bool) -> Finding | None:
    """Whether the update is the sum of more gradients than stated, or of one at another scale."""
    step = read_step(observation, error)
    stated = observation.num_examples * observation.local_steps
    if step is not None and step.terms > stated:
        images = f"{observation.num_examples} image{'s' * (observation.num_examples > 1)}"
        steps = "one gradient step" if observation.local_steps == 1 else f"{observation.local_steps} gradient steps"
        return Finding(
            "several_steps",
            f"the update is not {steps} of {images}: the classifier's gradient is a sum of at least {step.terms} "
            "different ones (more local steps, or larger batches, than stated)",
            hinders=True,
        )
    factor, rate = _scale(observation, step), observation.learning_rate
    if factor == 1:
        return None
    if observation.kind == "weights" and rate:
        return Finding(
            "learning_rate",
            f"the update is not one gradient step at the learning rate {rate:g}: by the classifier's gradient it is "
            f"{factor:.4g} times as long, and was taken for one step at {rate * factor:.4g}",
            fixed=True,
        )
    return None if clipped else scaled_loss(factor)


def _scale(observation: Observation, step: Step | None) -> float:
    """By what one step's update exceeds the gradient of the mean cross-entropy; 1 where that is not known."""
    known = step is not None and observation.local_steps == 1
    return step.factor if known and abs(step.factor - 1) > SCALED else 1.0


def _rescaled(observation: Observation, factor: float) -> Observation:
    """The update divided by `factor`, which is exact in the learning rate where weights were sent."""
    if factor == 1:
        return observation
    gradients = {name: gradient / factor for name, gradient in observation.gradients.items()}
    return replace(observation, gradients=gradients, learning_rate=observation.learning_rate * factor)


def find_weight_decay(observation: Observation) -> float | None:
    """lambda, where the update is clearly a gradient plus lambda times the weights; else None."""
    fits = []
    for identity in (classifier_sums(observation), position_balance(observation)):
        if identity is None or not identity.is_broken() or not identity.of_weights.any():
            continue
        decay = float(identity.of_update @ identity.of_weights / identity.of_weights.square().sum())
        left = float((identity.of_update - decay * identity.of_weights).norm() / identity.of_update.norm())
        if decay > 0 and left < CLEAN:
            fits.append((left, decay))
    return min(fits)[1] if fits else None


def remove_weight_decay(observation: Observation, decay: float, *, all_decay: bool = False) -> Observation:
    """The update without `decay` times the weights, embeddings and biases only where they were decayed too: what the
    update does not show is taken for matrices alone, or, with `all_decay`, for all parameters.

    Position rows that hold nothing but weight decay (masked positions) become exactly zero.
    """
    order = (True, False) if all_decay else (False, True)
    choices = [_subtracted(observation, decay, tables, vectors) for tables in order for vectors in order]
    tokenizer = tokenizer_of(observation)
    rows = None if tokenizer is None else tokenizer.position_rows(observation.gradients)
    if rows is None:
        return choices[0]

    def imbalance(choice: Observation) -> float:
        """Disagreement of position rows and bias; 0 for all choices where it cannot be measured."""
        own = tokenizer.position_rows(choice.gradients)[tokenizer.prefix :]
        found = remove_localisation(choice, tokenizer, own)[3]
        return 0.0 if found != found else found

    return min(choices, key=imbalance)


def _subtracted(observation: Observation, decay: float, tables: bool, vectors: bool) -> Observation:
    """Without decay in matrices and convolutions, with or without that in embeddings of tokens and in vectors."""
    tokenizer, weights = tokenizer_of(observation), dict(observation.model.named_parameters())
    tokens = set()
    if tokenizer is not None:
        tokens = {tokenizer.positions, tokenizer.shared_position, *tokenizer.prefix_tokens}
    moved = observation.learning_rate if observation.kind == "weights" else 0.0
    changed = {}
    for name, gradient in observation.gradients.items():
        weight = weights[name].detach()
        decayed = tables if name in tokens else vectors if weight.dim() < 2 else True
        changed[name] = minus_weights(gradient, weight, decay, moved) if decayed else gradient
    return replace(observation, gradients=changed)


def minus_weights(gradient: Tensor, weight: Tensor, decay: float, moved: float) -> Tensor:
    """gradient - decay * weight, exactly zero in rows that hold nothing else, as those of masked positions do.

    An entry that is not zero where its weight is shows something else, however small.

    Args:
        gradient, weight: of one parameter.
        decay: above 0.
        moved: the learning rate with which weights were turned into a gradient, whose round-off it divides; 0 for none.
    """
    rows, own = gradient.reshape(-1, gradient.shape[-1]).double(), weight.reshape(-1, weight.shape[-1]).double()
    sizes = own.square().sum(dim=1)
    along = (rows * own).sum(dim=1) / sizes.clamp(min=torch.finfo(torch.float64).tiny)  # each row's own decay
    aside = (rows - along[:, None] * own).norm(dim=1)
    unit = (decay + (1 / moved if moved else 0.0)) * torch.finfo(torch.float32).eps * sizes.sqrt()
    alone = (aside < ROUND_OFF_UNITS * unit) & ((along / decay - 1).abs() < EQUAL)
    alone &= ~((rows != 0) & (own == 0)).any(dim=1)
    left = torch.where(alone[:, None], 0.0, rows - decay * own)
    return left.to(gradient.dtype).reshape(gradient.shape)
