"""Updates that are not the gradient of one step: what was done to them, read from the numbers alone.

The attacks take an update for the gradient of a classification loss. What clients send instead leaves marks that an
honest float32 gradient does not have:

*Adaptive steps* (Adam, RMSprop, Adagrad, signs). Dividing by a running norm makes all entries of one size. An honest
gradient's largest entry is 20 to 500 times its rms, that of eight steps of Adam 2 times (on five ViTs and a ResNet).

*Weight decay* (update = gradient + lambda w). Sums that vanish for a gradient (`attacks.identities`) are lambda times
the same sums of the weights: D equations for one number. It is subtracted where the fit is clean. Position embeddings
and biases are often exempt: of the four possibilities the one is taken for which the position rows agree best with the
bias of the patch projection (`attacks.linear.position_rows`).

*Added noise* breaks both identities by the same standard deviation; where they are not both at hand, the rest of the
linear system (`attacks.linear.least_squares`) gives a second estimate.

*Precision, sparsification, clipping*: values on a coarser grid than float32's; exact zeros scattered within rows and
columns that are not zero; a norm that is a round number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from attacks.base import NEGLIGIBLE_NORM
from attacks.identities import classifier_sums, position_balance, tokenizer_of
from attacks.linear.masked_update import solve_masked
from attacks.linear.position_rows import read_position_rows, remove_localisation
from attacks.observation import Observation
from attacks.registry import UsageError

# Updates of fewer entries have no statistics, and of each parameter at most SAMPLE entries are looked at.
LEAST_ENTRIES, SAMPLE = 1000, 65536
# Share of the entries that must show a mark.
ALMOST_ALL = 0.98
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
# Share of scattered zeros from which an update is sparsified.
SPARSE = 0.2
# Relative distance from a round number.
ROUND = 1e-5


@dataclass(frozen=True)
class Finding:
    """One thing that is unusual about an update.

    Attributes:
        name: in short: adaptive_steps, second_moments, weight_decay, noise, precision, sparsification, clipping.
        sentence: what was seen, what it means for the attacks and what to do.
        fixed: it was undone, or does not matter to the attacks.
        hinders: the attacks' equations do not hold on such an update, so that no answer is to be trusted.
    """

    name: str
    sentence: str
    fixed: bool = False
    hinders: bool = False


def recognise(observation: Observation) -> list[Finding]:
    """What is unusual about an update; empty for the float32 gradient of a cross-entropy, and for one that vanishes."""
    if observation.gradient_norm() < NEGLIGIBLE_NORM:
        return []
    return [finding for finding in _findings(observation) if finding is not None]


def repair(observation: Observation) -> tuple[Observation, list[Finding]]:
    """The update without weight decay, where that can be removed, and everything that was recognised."""
    observation = replace(observation, gradients={n: _full(g) for n, g in observation.gradients.items()})
    found = recognise(observation)
    decay = None if _is_adaptive(found) else find_weight_decay(observation)
    if decay is None:
        return observation, found
    rest = remove_weight_decay(observation, decay)
    removed = Finding(
        "weight_decay",
        f"the update contains the weights times {decay:.2g} (weight decay); they were known and were subtracted",
        fixed=True,
    )
    return rest, [removed, *(finding for finding in recognise(rest) if finding.name != "weight_decay")]


def _findings(observation: Observation) -> Iterator[Finding | None]:
    values = {n: g.detach() for n, g in observation.gradients.items() if g.is_floating_point() and g.any()}
    if sum(g.numel() for g in values.values()) < LEAST_ENTRIES:
        return
    adaptive = _adaptive_steps(values)
    yield adaptive
    precision = _precision(observation, values)
    yield precision
    yield _clipping(observation)
    if adaptive is not None:
        return
    decay = find_weight_decay(observation)
    if decay is not None:
        yield Finding("weight_decay", f"the update contains the weights times {decay:.2g} (weight decay)", hinders=True)
    if precision is None:
        sparse = _sparsification(observation, values)
        yield sparse
        if sparse is None and decay is None:
            yield _noise(observation)


def _is_adaptive(found: list[Finding]) -> bool:
    return any(finding.name in ("adaptive_steps", "second_moments") for finding in found)


def _full(gradient: Tensor) -> Tensor:
    """Half-precision numbers as float32, others as they are."""
    return gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient


def _sample(tensor: Tensor) -> Tensor:
    """At most `SAMPLE` entries, spread evenly, flat."""
    flat = tensor.flatten()
    return flat[:: -(-len(flat) // SAMPLE)]


def _adaptive_steps(values: Mapping[str, Tensor]) -> Finding | None:
    sampled = torch.cat([_sample(g).float() for g in values.values()])
    sizes = sampled[sampled != 0].abs()
    advice = "send the gradient itself, or weights after plain SGD"
    if all(bool((g >= 0).all()) for g in values.values()):
        return Finding(
            "second_moments",
            "no entry is negative: these are squares, such as the second moments of Adam, and no gradient; the signs "
            f"are lost ({advice})",
            hinders=True,
        )
    equal = float(((sizes / sizes.median() - 1).abs() < EQUAL).float().mean())
    if equal > MOST:
        return Finding(
            "adaptive_steps",
            f"{equal:.0%} of the entries have the same magnitude: this is the first step of Adam, AdamW or a sign "
            f"optimiser, which keeps the signs of the gradient only ({advice})",
            hinders=True,
        )
    rms = torch.stack([g.float().square().mean().sqrt() for g in values.values() if g.numel() >= 64] or [sizes.mean()])
    peak = max(float(g.abs().max()) for g in values.values()) / float(sampled.square().mean().sqrt())
    spread = float(torch.quantile(rms, 0.9) / torch.quantile(rms, 0.1))
    if peak < EVEN_PEAK and spread < EVEN_SPREAD and len(sizes) > 10 * LEAST_ENTRIES:
        return Finding(
            "adaptive_steps",
            f"the largest entry is {peak:.1f} times the rms and all parameters have the same rms: these are steps of "
            f"an adaptive optimiser (Adam, RMSprop, Adagrad), and no gradient ({advice})",
            hinders=True,
        )
    return None


def _precision(observation: Observation, values: Mapping[str, Tensor]) -> Finding | None:
    means = "the attacks reach what that precision leaves of the image, about 20 to 45 dB"
    if observation.kind == "weights" and observation.learning_rate:
        sent = dict(observation.model.named_parameters())
        rate, slack = observation.learning_rate, 4 * torch.finfo(torch.float32).eps
        returned = [(sent[n].detach() - rate * g)[g != 0] for n, g in values.items() if n in sent]
        sampled, what = torch.cat([_sample(r).float() for r in returned]), "returned weights"
    else:
        sampled, what, slack = torch.cat([_sample(g).float() for g in values.values()]), "entries", 0.0
    sampled = sampled[sampled != 0]
    for kind in (torch.bfloat16, torch.float16):  # in this order: nearly all bfloat16 numbers are float16 numbers too
        share = float(((sampled.to(kind).float() - sampled).abs() <= slack * sampled.abs()).float().mean())
        if share > ALMOST_ALL:
            name = str(kind).removeprefix("torch.")
            return Finding("precision", f"all {what} are {name} numbers: {means}")
    large = [_sample(g) for g in values.values() if g.numel() >= 4096]
    coarse = [len(g.unique()) <= min(256, g.count_nonzero() // 4) for g in large]
    if coarse and sum(coarse) > ALMOST_ALL * len(coarse):
        return Finding("precision", f"no parameter's gradient has more than 256 different values (int8): {means}")
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


def _sparsification(observation: Observation, values: Mapping[str, Tensor]) -> Finding | None:
    """Zeros within rows and columns that are not zero: a layer's honest gradient is zero in whole rows or columns."""
    tables = {n for n, module in observation.model.named_modules() if isinstance(module, nn.Embedding)}
    zeros = entries = 0
    for name, gradient in values.items():
        if gradient.dim() not in (2, 4) or name.rpartition(".")[0] in tables:
            continue
        rows = gradient.flatten(1)
        rows = rows[(rows != 0).any(dim=1)][:, (rows != 0).any(dim=0)]
        zeros, entries = zeros + int((rows == 0).sum()), entries + rows.numel()
    if entries < LEAST_ENTRIES or zeros < SPARSE * entries or _is_rounded(observation, values):
        return None
    return Finding(
        "sparsification",
        f"{zeros / entries:.0%} of the entries are zero, scattered over rows and columns: only the largest were sent "
        "(top-k sparsification); closed forms need all entries of the first layers",
        hinders=True,
    )


def _is_rounded(observation: Observation, values: Mapping[str, Tensor]) -> bool:
    """Whether the weights moved by no more than a few units of their round-off, so that many did not move at all."""
    if observation.kind != "weights" or not observation.learning_rate:
        return False
    sent = dict(observation.model.named_parameters())
    steps = torch.cat([_sample(g).float() for n, g in values.items() if n in sent]) * observation.learning_rate
    weights = torch.cat([_sample(sent[n].detach()).float() for n in values if n in sent])
    kept = weights != 0
    return bool((steps[kept].abs() / weights[kept].abs()).median() < 100 * torch.finfo(torch.float32).eps)


def _noise(observation: Observation) -> Finding | None:
    identities = (classifier_sums(observation), position_balance(observation))
    levels = [identity.noise() for identity in identities if identity is not None and identity.is_broken()]
    if not levels:
        return None
    rest = _rest_of_system(observation) if len(levels) < 2 else None
    levels = sorted([*levels, rest] if rest is not None else levels)
    if len(levels) < 2 or not levels[-1] < AGREEING * levels[0]:
        return None
    squares = [g.double().square().sum() for g in observation.gradients.values()]
    rms = float(sum(squares) / sum(g.numel() for g in observation.gradients.values())) ** 0.5
    level = (levels[0] * levels[-1]) ** 0.5
    return Finding(
        "noise",
        f"noise of standard deviation {level:.1e} was added to every entry of the update, whose rms is {rms:.1e}; a "
        "reconstruction above the guesses is a leak all the same, and a failed one shows that the noise holds against "
        "these attacks only",
    )


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


def remove_weight_decay(observation: Observation, decay: float) -> Observation:
    """The update without `decay` times the weights, embeddings and biases only where they were decayed too.

    Position rows that hold nothing but weight decay (masked positions) become exactly zero.
    """
    choices = [
        _subtracted(observation, decay, tables, vectors) for tables in (False, True) for vectors in (False, True)
    ]
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
        changed[name] = _minus_weights(gradient, weight, decay, moved) if decayed else gradient
    return replace(observation, gradients=changed)


def _minus_weights(gradient: Tensor, weight: Tensor, decay: float, moved: float) -> Tensor:
    """gradient - decay * weight, exactly zero in rows that hold nothing else.

    Args:
        moved: the learning rate with which weights were turned into a gradient, whose round-off it divides; 0 for none.
    """
    rows, own = gradient.reshape(-1, gradient.shape[-1]).double(), weight.reshape(-1, weight.shape[-1]).double()
    sizes = own.square().sum(dim=1)
    along = (rows * own).sum(dim=1) / sizes.clamp(min=torch.finfo(torch.float64).tiny)  # each row's own decay
    aside = (rows - along[:, None] * own).norm(dim=1)
    unit = (decay + (1 / moved if moved else 0.0)) * torch.finfo(torch.float32).eps * sizes.sqrt()
    alone = (aside < ROUND_OFF_UNITS * unit) & ((along / decay - 1).abs() < EQUAL)
    left = torch.where(alone[:, None], 0.0, rows - decay * own)
    return left.to(gradient.dtype).reshape(gradient.shape)
