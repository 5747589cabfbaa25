"""The auditor: assignment, scoring, and the contents of an `Observation` under a threat model."""

from __future__ import annotations

import itertools

import pytest
import torch

from attacks import ATTACKS, Attack, ThreatModel
from fedmjp.audit.aggregate import SeenUpdate
from fedmjp.audit.assignment import match
from fedmjp.audit.harness import audit_update, scorer
from fedmjp.audit.observe import SentModels, observe_update
from fedmjp.audit.originals import Originals
from fedmjp.client import ClientTask, float_buffers
from fedmjp.config import RunConfig, from_flat
from tests.conftest import observe, photographs


def test_the_assignment_is_the_best_permutation() -> None:
    originals = photographs(32, 5)
    shuffled = (
        originals[[3, 0, 4, 1, 2]] + 0.2 * torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    ).clamp(0, 1)
    found = match(shuffled, originals)

    def cost(order) -> float:
        return float((shuffled[list(order)] - originals).square().sum())

    best = min(itertools.permutations(range(5)), key=cost)
    assert found.tolist() == list(best) == [1, 3, 4, 0, 2]


def small(**options) -> RunConfig:
    return from_flat({"model": "vit_mini_64", "weights": "random", "clients": 2, "test_limit": 4, **options})


def view_of(config: RunConfig, grants: ThreatModel | None = None):
    task = ClientTask(config, config.defense[0])
    weights = dict(task.model.module.named_parameters()) | float_buffers(task.model.module)
    weights = {n: w.detach().clone() for n, w in weights.items()}
    result = task.update(0, 1, weights)
    threat = grants or config.threat_model()
    return task, observe_update(
        task,
        threat,
        model=SentModels(task.model.module)(weights),
        round=1,
        client=0,
        sent=weights,
        received=result.tensors,
        labels=Originals(task, simulated=True).labels(SeenUpdate(1, 0, (0,), weights, result.tensors)),
    )


def test_the_model_that_was_sent_is_built_anew_only_when_its_weights_change() -> None:
    task = ClientTask(small(), "none")
    first = {n: w.detach().clone() for n, w in task.model.module.named_parameters()}
    second = {n: w + 1 for n, w in first.items()}
    models = SentModels(task.model.module)
    built = models(first)
    assert models({n: w.clone() for n, w in first.items()}) is built
    other = models(second)
    assert other is not built
    for weights, model in ((first, built), (second, other)):
        assert all(torch.equal(weights[n], p) for n, p in model.named_parameters())


def build_attacks(*names: str) -> dict[str, Attack]:
    return {name: ATTACKS.get(name)() for name in names}


def score_of(task, view, attack: str) -> list[float]:
    originals = task.batch(0, 1, 0).images
    attacks = build_attacks(attack)
    scored = audit_update([view], originals, attacks=attacks, baselines={}, score_images=scorer(8, None))
    return [r["psnr"] for r in next(iter(scored)).records]


def test_gradient_and_one_step_weights_leak_the_same_image() -> None:
    for update in ("gradient", "weights"):
        task, view = view_of(small(update=update))
        assert score_of(task, view, "patch_embedding")[0] > (60 if update == "gradient" else 30), update


@pytest.mark.parametrize("attack", ["patch_embedding", "april"])
def test_mjp_at_90_percent_stops_both_closed_forms(attack: str) -> None:
    task, view = view_of(small(defense="mjp", gamma=0.9, block="april" if attack == "april" else "standard"))
    assert score_of(task, view, attack)[0] < 15


@pytest.mark.parametrize("attack", ["patch_embedding", "april"])
@pytest.mark.parametrize("block", ["standard", "april"])
def test_mjp_at_90_percent_on_deit_s(attack: str, block: str) -> None:
    task, view = view_of(small(model="deit_s", defense="mjp", gamma=0.9, block=block))
    originals = task.batch(0, 1, 0).images
    attacks = build_attacks(attack)
    scored = next(iter(audit_update([view], originals, attacks=attacks, baselines={}, score_images=scorer(16, None))))
    assert scored.records[0]["psnr"] < 15
    assert "MJP" in scored.diagnosis


def test_an_observation_holds_only_what_the_threat_model_grants() -> None:
    _, view = view_of(small(), ThreatModel.parse(["model_weights"]))
    assert view.labels is None
    assert "pos_embed" not in view.gradients
    _, view = view_of(small(), ThreatModel.parse(["labels", "position_gradient"]))
    assert view.labels is not None
    assert "pos_embed" in view.gradients


def test_granted_labels_are_those_of_the_batches_of_all_local_steps() -> None:
    config = small(update="weights", local_steps=2, batch_size=2, train_limit=16)
    task, view = view_of(config, ThreatModel.parse(["labels"]))
    own = torch.cat([task.batch(0, 1, step).labels for step in range(2)])
    assert len(own.unique()) > 1
    assert torch.equal(view.all_labels(), own)
    assert torch.equal(view.labels, own[:2])
    both = Originals(task, simulated=True).labels(SeenUpdate(1, 0, (0, 1), {}, {}))  # of two clients' mean
    assert torch.equal(both, torch.cat([task.batch(client, 1, step).labels for step in range(2) for client in (0, 1)]))


def test_baselines_are_scored_before_attacks(mini) -> None:
    images = photographs(64, 2)
    scored = list(
        audit_update(
            [observe(mini, images[:1])],
            images[:1],
            attacks=build_attacks("patch_embedding", "april"),
            baselines={"mean_image": images.mean(dim=0, keepdim=True), "other_image": images[1:]},
            score_images=scorer(8, None),
            skip=lambda name: name == "april",
        )
    )
    assert [s.attack for s in scored] == ["mean_image", "other_image", "patch_embedding"]
    assert scored[2].records[0]["psnr"] > 40 > scored[1].records[0]["psnr"]


def test_an_exact_answer_goes_to_its_original_beside_a_bad_one() -> None:
    """By squared errors the black answer takes the darker original, and the exact one is scored against the other."""
    from fedmjp.data import load_data

    photos, wrong = load_data("photos", size=32).train.images(range(12)), 0
    for first in range(12):
        for second in range(12):
            if first != second:
                pair = photos[[first, second]]
                answers = torch.stack([torch.zeros_like(pair[0]), pair[0]])
                wrong += int(match(answers, pair)[0] != 1)
    assert wrong == 0
