"""Audit a model that is not ours: one training step in plain PyTorch, scored against the images it was made from.

For a running Flower app, where only updates are seen: `fedmjp.audit.watcher.Watcher`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

from attacks import Attack, Capability, Observation, ThreatModel, Tokenizer, UsageError, check_tokenizer, find_tokenizer
from attacks.findings import Finding
from attacks.fingerprints import repair
from fedmjp.audit.answer import Audit
from fedmjp.audit.folder import Subject
from fedmjp.audit.guesses import ORIGIN, embedded_guesses
from fedmjp.audit.harness import Scored, ScoreImages, audit_update, scorer
from fedmjp.audit.inputs import (
    check_gradients,
    check_images,
    check_labels,
    check_normalisation,
    check_reproduced,
    frozen_parameters,
    repeated_images,
    unwrap,
)
from fedmjp.audit.observe import as_granted, as_trained
from fedmjp.audit.suite import Suite, select_attacks
from fedmjp.audit.verdict import judge
from fedmjp.budgets import AUTO, DEFAULT_BUDGET, named_attacks
from fedmjp.metrics import load_lpips
from fedmjp.records.rows import ANY_PLACE, METRICS, OPTIONAL, ROW_KEYS


def audit_gradient(
    model: nn.Module,
    images: Tensor,
    gradients: Mapping[str, Tensor],
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    attacks: str | Sequence[str | Attack] = AUTO,
    labels: Tensor | None = None,
    threat_model: ThreatModel | None = None,
    budget: float = DEFAULT_BUDGET,
    lpips_net: str = "squeeze",
    lpips_weights: str | Path | None = None,
) -> Audit:
    """Attack one step's gradient and score the answers against the images it was made from.

    Args:
        model: timm, torchvision or Hugging Face ViT, with the weights at which the gradient was taken.
        images: (B, C, H, W) originals in [0, 1], before normalisation.
        gradients: by parameter name, of the loss on the normalised images: tensors or arrays, None where there is none.
        mean, std: the client's normalisation, one number a channel; by default 0 and 1.
        attacks: "auto" (all that have something to add, within the budget), "all", or names and instances
            (`MJPSubspace(prior=VectorialVariation(strength=20))`).
        labels: (B,) of the images, to check that the inputs belong together. The adversary gets them only if
            `threat_model` grants labels.
        threat_model: what the adversary is granted; by default that of `python -m fedmjp.simulate`.
        budget: seconds of one CPU core that "auto" may plan.
        lpips_net, lpips_weights: of the LPIPS metric, see `fedmjp.metrics.load_lpips`.

    Raises:
        UsageError: an input that cannot be audited (`fedmjp.audit.inputs`), a model without a patch projection or whose
            tokens are not projection + position, or an unknown attack.
    """
    threat_model = threat_model or ThreatModel()
    observation, images, findings = _observe(model, images, gradients, mean, std, labels)
    tokenizer = readable_tokenizer(observation.model, observation.image_shape)
    granted = {"weights_granted": Capability.MODEL_WEIGHTS in threat_model.grants}
    granted |= {} if Capability.LABELS in threat_model.grants else {"labels": None}
    observation = as_granted(replace(observation, **granted), threat_model)
    suite = choose_attacks(attacks, [observation], threat_model, budget)
    score_images = scorer(tokenizer.patch_size, load_lpips(lpips_net, lpips_weights, images.device))
    scored, added = _attacked(observation, images, suite, score_images, findings, budget)
    subject = Subject(type(observation.model).__name__, "own images", "scored against the original", threat_model)
    rows = [row for one in scored for row in subject.rows(observation, one, [f"image {i}" for i in range(len(images))])]
    rows = [{**OPTIONAL, **row} for row in rows]
    numbers = dict.fromkeys((*METRICS, ANY_PLACE, "seconds"), "float64")
    table = pd.DataFrame(rows, columns=list(ROW_KEYS)).astype(numbers)
    return Audit(
        images={one.attack: one.images for one in scored},
        known={one.attack: one.known for one in scored if one.known is not None},
        verdict=judge(table, suite.left_out),
        diagnoses={one.attack: one.diagnosis for one in scored if one.diagnosis},
        not_run=dict(suite.left_out),
        findings=(*findings, *added),
        rows=table,
        originals=images,
        subject=subject,
        options={"mean": observation.mean, "std": observation.std, "attacks": list(suite.chosen), "budget": budget},
    )


def _attacked(
    observation: Observation,
    images: Tensor,
    suite: Suite,
    score_images: ScoreImages,
    findings: list[Finding],
    budget: float,
) -> tuple[list[Scored], list[Finding]]:
    """The scored answers of the attacks and of the guesses without a gradient, and what is to be said of the run."""
    guesses = embedded_guesses(images)
    added = [Finding("guesses", ORIGIN, fixed=True)] if guesses else []
    scored = audit_update(
        [observation],
        images,
        attacks=suite.chosen,
        baselines=guesses,
        score_images=score_images,
        weights_granted=observation.weights_granted,
        findings=[*findings, *added],
    )
    answers = list(scored)
    overrun = suite.overrun({one.attack: one.seconds for one in answers}, budget)
    return answers, added + ([Finding("budget", overrun, fixed=True)] if overrun else [])


def _observe(
    model: nn.Module,
    images: Tensor,
    gradients: Mapping[str, Tensor],
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    labels: Tensor | None,
) -> tuple[Observation, Tensor, list[Finding]]:
    """The checked update as a server sees it, the images beside it, and what was found; see `audit_gradient`."""
    images = check_images(images)
    shape = tuple(images.shape[1:])
    mean, std = ([usual] * shape[0] if given is None else given for given, usual in ((mean, 0.0), (std, 1.0)))
    mean, std = check_normalisation(mean, std, shape[0])
    labels = None if labels is None else check_labels(labels, len(images))
    model, findings = unwrap(model)
    readable_tokenizer(model, shape)  # refuses models that cannot be audited before anything is computed
    gradients, renamed = check_gradients(model, gradients)
    model = as_trained(model, gradients)
    like = next(iter(gradients.values()))
    images = images.to(like.device, torch.promote_types(images.dtype, like.dtype))  # half precision rounds no original
    given = Observation(gradients, model, len(images), shape, mean, std, round=1, labels=labels)
    observation, recognised = repair(given)
    findings += [*renamed, *frozen_parameters(given), *recognised, *repeated_images(images)]
    try:
        findings += check_reproduced(observation, images, recognised)
    except IndexError as error:
        if labels is None:
            raise
        raise UsageError(f"the model's classes do not hold the labels {labels.tolist()}: {error}") from error
    return observation, images, findings


def readable_tokenizer(model: nn.Module, shape: tuple[int, int, int]) -> Tokenizer:
    """The model's tokenizer, proved where it has learnable positions.

    Raises:
        UsageError: see `find_tokenizer` and `check_tokenizer`.
    """
    tokenizer = find_tokenizer(model, shape)
    if tokenizer.positions is not None:
        check_tokenizer(model, tokenizer, shape)
    return tokenizer


def choose_attacks(
    attacks: str | Sequence[str | Attack],
    observations: Sequence[Observation],
    threat_model: ThreatModel,
    budget: float,
) -> Suite:
    """The attacks to run: names through `select_attacks`, instances as they are, under different names.

    Args:
        observations: one client's updates, oldest first; with none, names and instances are only checked.

    Raises:
        UsageError: an unknown attack, one that needs more than is granted, or none at all.
    """
    entries = [attacks] if isinstance(attacks, (str, Attack)) else list(attacks)
    if not entries:
        raise UsageError("attacks is empty; pass 'auto', 'all', or names and instances of attacks")
    names = [e for e in entries if isinstance(e, str) and (observations or e != AUTO)]
    suite = select_attacks(names, observations, threat_model, budget=budget)
    chosen = {}
    for name, attack in named_attacks([e for e in entries if isinstance(e, Attack)]):
        attack.require(threat_model, name)
        copies = sum(type(other) is type(attack) for other in chosen.values())
        chosen[f"{name}_{copies + 1}" if copies else name] = attack
    left_out = {name: reason for name, reason in suite.left_out.items() if name not in chosen}
    chosen |= {n: a for n, a in suite.chosen.items() if n not in chosen}
    return Suite(chosen, left_out, suite.planned)
