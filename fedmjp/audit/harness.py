"""Run the chosen attacks on one update and score their reconstructions against the originals.

Only the auditor has both the adversary's `Observation` and the client's batch. Every image of every attack gives one
flat record of scores. Two baselines that need no gradient (the mean image of the data, and another image of it) are
scored in the same way: an attack has to be better than both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attacks import Attack, Observation, Reconstruction
from attacks.arithmetic import exact_arithmetic
from attacks.certificate import certify, certify_encoder
from attacks.findings import Finding
from attacks.observation import CLASSIFIER_LEFT_OUT
from fedmjp.audit.assignment import NONE, match
from fedmjp.audit.verdict import RECOGNISABLE
from fedmjp.metrics import METRIC_DIRECTIONS, any_place, score
from fedmjp.records.rows import ANY_PLACE

ScoreImages = Callable[[Tensor, Tensor], list[dict[str, float]]]
# What every image is scored by, in a results row.
SCORES = (*METRIC_DIRECTIONS, ANY_PLACE)


@dataclass(frozen=True)
class Scored:
    """Scores of one attack on one update.

    Attributes:
        attack: name of the attack or of the baseline.
        parameters: its configuration.
        images: (B, C, H, W) reconstructions in [0, 1], in the order of the originals, or None; NaN for originals of
            which there is none.
        records: for each image of the batch the metrics by name (NaN where there is no reconstruction).
        seconds: wall-clock time of the attack.
        diagnosis: of the attack, see `Reconstruction`.
        reconstruction: as the attack returned it; None for baselines.
        known: (B, 1, H, W) bool, the pixels that the attack vouches for, in the order of the originals, or None.
    """

    attack: str
    parameters: Mapping[str, Any]
    images: Tensor | None
    records: list[dict[str, float]]
    seconds: float
    diagnosis: str
    reconstruction: Reconstruction | None = None
    known: Tensor | None = None

    def row(self, case: Mapping[str, Any], image_id: str, gradient_norm: float, place: int = 0) -> dict[str, Any]:
        """The results row of one image, without the columns that describe the run.

        Args:
            case: the columns that identify a row (`records.rows.CASE`).
            image_id: of the image.
            gradient_norm: Euclidean norm of the update.
            place: index of the image in its batch.
        """
        details = dict(self.reconstruction.details) if self.reconstruction else {}
        flags = list(self.reconstruction.flags) if self.reconstruction else []
        answer = {"seconds": self.seconds, "diagnosis": self.diagnosis, "details": details, "flags": flags}
        answer |= (
            {"known": None, "certified": None, "residual": None}
            if self.reconstruction is None
            else {
                "known": _share_known(self, place),
                "certified": self.reconstruction.certified,
                "residual": self.reconstruction.residual,
            }
        )
        where = {"image": place, "image_id": image_id, "gradient_norm": gradient_norm}
        return {**case, **where, **self.records[place], **answer}


def _share_known(scored: Scored, place: int) -> float | None:
    """Share of the pixels that the attack vouches for, of the whole batch; of the one image where the attack answers
    with fewer images than the batch holds. None without images.

    Args:
        place: index of the image in its batch.
    """
    known = scored.reconstruction.known
    if known is None or len(known) >= len(scored.records):
        return None if known is None else float(known.float().mean())
    known = known if scored.known is None else scored.known
    return float(known[place].float().mean()) if place < len(known) else 0.0


def answer(attack: Attack, observations: Sequence[Observation], *, weights_granted: bool = False) -> Reconstruction:
    """An attack's answer to the last of `observations`, certified where it can be.

    Args:
        weights_granted: the adversary may use the model's weights, so that the answer can be certified.
    """
    found = attack(observations)
    if not weights_granted:
        return found
    with exact_arithmetic():
        certified, residual = certify(observations[-1], found)
        of_encoder, remaining = False, residual
        if not certified and (found.known is None or bool(found.known.all())):  # else the attack itself doubts a part
            of_encoder, remaining = certify_encoder(observations[-1], found)
    if of_encoder:
        flags = (*found.flags, CLASSIFIER_LEFT_OUT)
        return replace(found, certified=True, residual=remaining, flags=flags)
    return replace(found, certified=certified, residual=residual)


def explained(scored: Scored, findings: Sequence[Finding]) -> Scored:
    """An attack's answer on an update about which something was noticed.

    What hinders the attacks becomes part of the diagnosis, and nothing is vouched for, unless an image was recovered
    all the same (where the originals are not known: unless the answer is certified). What else is unusual is added to a
    diagnosis that the attack has anyway: it may be the reason.
    """
    found = scored.reconstruction
    scores = [record["psnr"] for record in scored.records]
    unscored = all(score != score for score in scores) and found is not None
    recovered = found.certified if unscored else any(score > RECOGNISABLE for score in scores)
    hindrances = [finding.sentence for finding in findings if finding.hinders and not recovered]
    others = [f.sentence for f in findings if not (f.fixed or f.hinders) and scored.diagnosis]
    diagnosis = "; ".join(text for text in (scored.diagnosis, *hindrances, *others) if text)
    if not hindrances or found is None or found.known is None:
        return replace(scored, diagnosis=diagnosis)
    nothing = None if scored.known is None else torch.zeros_like(scored.known)
    found = replace(found, known=torch.zeros_like(found.known))
    return replace(scored, diagnosis=diagnosis, reconstruction=found, known=nothing)


def unscored(attack: Attack, name: str, found: Reconstruction, size: int, findings: Sequence[Finding]) -> Scored:
    """An attack's answer where the originals are not known: without metrics; see `explained`.

    Args:
        size: images of the batch.
    """
    records = [dict.fromkeys(SCORES, float("nan"))] * size
    images = None if found.images is None else found.images.float()
    return explained(
        Scored(name, attack.parameters(), images, records, found.seconds, found.diagnosis, found, found.known), findings
    )


def run_attack(
    attack: Attack,
    name: str,
    observations: Sequence[Observation],
    originals: Tensor,
    score_images: ScoreImages,
    *,
    weights_granted: bool = False,
) -> Scored:
    """Run one attack on the last of `observations` and score it.

    Args:
        attack: the attack.
        name: its name, for the record.
        observations: the client's updates, oldest first.
        originals: (B, C, H, W) in [0, 1], the batch of the last update.
        score_images: see `scorer`.
        weights_granted: the adversary may use the model's weights, so that the answer can be certified.
    """
    found = answer(attack, observations, weights_granted=weights_granted)
    return score_found(attack, name, [found], [originals], score_images)[0]


def score_found(
    attack: Attack,
    name: str,
    found: Sequence[Reconstruction],
    originals: Sequence[Tensor],
    score_images: ScoreImages,
) -> list[Scored]:
    """Score the reconstructions of one attack on several updates, all images in one batch.

    Args:
        attack: the attack.
        name: its name, for the records.
        found: one reconstruction per update.
        originals: for each update (B, C, H, W) in [0, 1], all of one size.
        score_images: see `scorer`.
    """
    matched = [_matched(f, o) for f, o in zip(found, originals, strict=True)]
    present = [m for m in matched if m is not None]
    records = iter(
        score_images(
            torch.cat([m.images[m.given] for m in present]),
            torch.cat([o[m.given] for m, o in zip(matched, originals, strict=True) if m is not None]),
        )
        if present
        else []
    )
    missing = dict.fromkeys(SCORES, float("nan"))
    scored = []
    for answer, target, own in zip(found, originals, matched, strict=True):
        given = [False] * len(target) if own is None else own.given.tolist()
        scores = [next(records) if there else missing for there in given]
        images, known = (None, None) if own is None else (own.images, own.known)
        scored.append(
            Scored(name, attack.parameters(), images, scores, answer.seconds, answer.diagnosis, answer, known)
        )
    return scored


@dataclass(frozen=True)
class _Matched:
    """Reconstructions in the order of the originals.

    Attributes:
        images: (B, C, H, W); NaN where none is given.
        given: (B,) bool.
        known: (B, 1, H, W) bool, or None.
    """

    images: Tensor
    given: Tensor
    known: Tensor | None


def _matched(found: Reconstruction, originals: Tensor) -> _Matched | None:
    """An attack's answer beside the originals (B, C, H, W); None without an image."""
    if found.images is None:
        return None
    order = match(found.images.to(originals), originals)
    given = order != NONE
    images = found.images.to(originals)[order]
    images[~given] = float("nan")
    if found.known is None:
        return _Matched(images, given, None)
    known = found.known[order.to(found.known.device)].clone()
    known[~given.to(known.device)] = False
    return _Matched(images, given, known)


def scorer(patch_size: int, lpips: Callable | None) -> ScoreImages:
    """A function from (reconstructions, originals), (B, C, H, W) in [0, 1], to one dictionary of metrics per image.

    Args:
        patch_size: side of a patch in pixels, for `patch_recovery` and `any_place`.
        lpips: LPIPS metric, or None to leave its column NaN.
    """

    def score_images(reconstructions: Tensor, originals: Tensor) -> list[dict[str, float]]:
        """The metrics of each pair of images."""
        columns = score(reconstructions, originals, patch_size=patch_size, lpips=lpips)
        columns[ANY_PLACE] = any_place(reconstructions, originals, patch_size)
        lists = {name: values.tolist() for name, values in columns.items()}  # one transfer per metric, not per number
        return [{name: values[i] for name, values in lists.items()} for i in range(len(originals))]

    return score_images


def audit_update(
    observations: Sequence[Observation],
    originals: Tensor,
    *,
    attacks: Mapping[str, Attack],
    baselines: Mapping[str, Tensor],
    score_images: ScoreImages,
    skip: Callable[[str], bool] = lambda name: False,
    weights_granted: bool = False,
    findings: Sequence[Finding] = (),
) -> Iterator[Scored]:
    """Score the baselines, then the attacks, on one update.

    Args:
        observations: the client's updates so far, the audited one last.
        originals: (B, C, H, W) in [0, 1].
        attacks: by name.
        baselines: name -> (B, C, H, W) guesses that need no gradient.
        score_images: see `scorer`.
        skip: whether to leave out an attack or baseline, by name.
        weights_granted: the adversary may use the model's weights, so that answers can be certified.
        findings: what was noticed about the audited update (`attacks.fingerprints.repair`); see `explained`.
    """
    for name, guess in baselines.items():
        if not skip(name):
            yield Scored(name, {}, guess, score_images(guess, originals), 0.0, "")
    for name, attack in attacks.items():
        if not skip(name):
            with torch.no_grad():
                scored = run_attack(
                    attack, name, observations, originals, score_images, weights_granted=weights_granted
                )
            yield explained(scored, findings)
