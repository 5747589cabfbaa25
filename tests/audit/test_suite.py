"""The suite `auto`: chosen from what the update exposes and the threat model grants, the fastest first, in a budget."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attacks import ATTACKS, Observation, ThreatModel, UsageError
from fedmjp.audit.suite import select_attacks
from fedmjp.defenses import DEFENSES
from fedmjp.models import build_model
from tests.attacks.mjp.test_mjp_subspace import jigsawed
from tests.conftest import observe, photographs

CLOSED = {"patch_embedding"}
MASKED = {"mjp_subspace", "unmix"}
OVER_ROUNDS = {"mjp_rounds", "unmix_rounds"}
SEARCHES = {"april_optimisation", "dlg", "gradvit", "idlg", "inverting_gradients", "see_through_gradients"}
PEERS = {name for name in ATTACKS if name.startswith("breaching_")}


def masked(number: int = 1, size: int = 64) -> list[Observation]:
    model = build_model(f"vit_mini_{size}_mjp", num_classes=8, weights="random")
    return [jigsawed(model, photographs(size, 1), 0.2, seed=seed) for seed in range(number)]


def one_image_each(number: int) -> list[Observation]:
    """Updates of one client, each of another image."""
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random")
    return [jigsawed(model, photographs(64, number)[n : n + 1], 0.2, seed=n) for n in range(number)]


def plain(**changes) -> list[Observation]:
    model = build_model("vit_mini_64", num_classes=8, weights="random", block=changes.pop("block", "standard"))
    return [observe(model, photographs(64, changes.pop("images", 1)), **changes)]


def chosen(observations, grants=ThreatModel(), budget: float = 1e9) -> set[str]:  # noqa: B008
    return set(select_attacks(["auto"], observations, grants, budget=budget).chosen)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (plain, CLOSED | SEARCHES),
        (lambda: plain(block="april"), CLOSED | SEARCHES | {"april"}),
        (lambda: plain(images=3), CLOSED | SEARCHES),
        (lambda: plain(images=3) * 2, CLOSED | SEARCHES | {"batch_rounds"}),
        (masked, CLOSED | MASKED | SEARCHES),
        (lambda: masked(3), CLOSED | MASKED | OVER_ROUNDS | SEARCHES),
        (lambda: one_image_each(3), CLOSED | MASKED | SEARCHES),
        (lambda: [*one_image_each(2), *masked(1)], CLOSED | MASKED | OVER_ROUNDS | SEARCHES),
    ],
)
def test_what_the_update_exposes_decides(make, expected: set[str]) -> None:
    assert chosen(make()) == expected


def test_what_is_granted_decides() -> None:
    weights = {"april_optimisation", "unmix", "unmix_rounds"} | SEARCHES
    assert chosen(masked(3), ThreatModel.parse(["position_gradient"])) == {"patch_embedding", "mjp_subspace"}
    without_rounds = ThreatModel.parse(["position_gradient", "model_weights"])
    assert chosen(masked(3), without_rounds) == CLOSED | MASKED | SEARCHES
    assert chosen(masked(3), ThreatModel.parse(["position_gradient", "several_rounds"])).isdisjoint(weights)


def test_updates_of_other_images_do_not_shorten_the_search() -> None:
    attack = ATTACKS.get("unmix_rounds")()
    alone = ATTACKS.get("unmix")().estimated_seconds(one_image_each(3))
    assert attack.estimated_seconds(one_image_each(3)) == pytest.approx(alone)
    assert attack.estimated_seconds(masked(3)) < alone
    reason = "no earlier update of this client shows the image of the last one: unmix gives the same answer"
    assert attack.obstacle(one_image_each(3)) == reason


@pytest.mark.parametrize("budget", [0.0, 1.0, 5.0, 60.0])
def test_the_fastest_come_first_within_the_budget(budget: float) -> None:
    views = masked(3)
    suite = select_attacks(["auto"], views, ThreatModel(), budget=budget)
    seconds = [attack.estimated_seconds(views) for attack in suite.chosen.values()]
    assert seconds == sorted(seconds)
    assert sum(seconds) <= budget
    beyond = {n for n, reason in suite.left_out.items() if "beyond the budget" in reason}
    assert set(suite.chosen) | beyond == chosen(views)
    if beyond:
        least = min(ATTACKS.get(name)().estimated_seconds(views) for name in beyond)
        assert sum(seconds) + least > budget


def test_every_other_attack_is_named_with_a_reason() -> None:
    for names in (["auto"], ["all"], ["april"], ["auto", "breaching_dlg"]):
        suite = select_attacks(names, plain(), ThreatModel(), budget=5.0)
        assert set(suite.chosen) | set(suite.left_out) == set(ATTACKS)
        assert set(suite.chosen).isdisjoint(suite.left_out)
        assert all(suite.left_out.values())
    assert select_attacks(["all"], plain(), ThreatModel()).chosen.keys() >= PEERS
    auto = select_attacks(["auto"], plain(), ThreatModel()).left_out
    assert all("another package" in auto[name] for name in PEERS)
    assert "APRIL's equation does not hold" in auto["april"]


def test_what_took_longer_than_the_budget_is_named() -> None:
    suite = select_attacks(["auto"], plain(), ThreatModel(), budget=60.0)
    planned = dict(suite.planned)
    assert list(planned) == list(suite.chosen)
    assert suite.overrun(planned, 60.0) == ""
    assert suite.overrun({name: 100.0 for name in planned}, 1e6) == ""
    slow = suite.overrun(planned | {"patch_embedding": 90.0}, 60.0)
    assert "beyond the budget of 60 s: patch_embedding took 90.0 s where 0.0 s" in slow
    assert select_attacks(["all"], plain(), ThreatModel(), budget=1.0).planned == {}


SELECT = """
import sys, torch
from attacks import Observation, ThreatModel
from fedmjp.audit.suite import select_attacks
from tests.attacks.models import timm_vit
model = timm_vit()
gradients = {n: torch.randn_like(p) for n, p in model.named_parameters()}
view = Observation(gradients, model, 1, (3, 32, 32), (0.5,) * 3, (0.5,) * 3)
for names in sys.argv[1:]:
    suite = select_attacks([names], [view], ThreatModel())
    assert set(suite.chosen) >= {"patch_embedding"}, suite
    assert "breaching" not in sys.modules and "breaching_dlg" in suite.left_out
"""


def test_attacks_that_run_by_name_only_are_not_built() -> None:
    """The package `breaching` takes seconds to import, and may not be installed."""
    command = [sys.executable, "-c", SELECT, "auto", "patch_embedding"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


def test_named_attacks_are_refused_what_is_not_granted() -> None:
    with pytest.raises(UsageError, match="mjp_rounds.*several_rounds"):
        select_attacks(["mjp_rounds"], masked(2), ThreatModel.parse(["position_gradient"]))


def test_settings_reach_the_attacks() -> None:
    suite = select_attacks(["dlg"], plain(), ThreatModel(), settings={"dlg": {"steps": 7}})
    assert suite.chosen["dlg"].steps == 7


@pytest.mark.parametrize("defense", list(DEFENSES))
def test_the_suite_takes_every_defence_into_account(defense: str) -> None:
    """Attacks that a defence names exist, and one of them is in the suite on an update under that defence."""
    kind = DEFENSES.get(defense)
    assert all(name in ATTACKS for name in kind().known_by)
    model = build_model(kind().model_name("vit_mini_64"), num_classes=8, weights="random")
    generator = torch.Generator().manual_seed(0)
    seen = kind().on_input(photographs(64, 1), model, generator, 1)
    view = observe(model, seen.images, mask=seen.position_mask)
    sent = kind().message(dict(view.gradients), generator, {})[0]
    known = kind().known_by or ("patch_embedding",)
    assert chosen([dataclasses.replace(view, gradients=sent)]) & set(known)


def test_estimates_are_of_the_right_size() -> None:
    """Closed forms take less than a second, a search of 300 steps on a small model seconds to minutes."""
    views = masked(2)
    assert ATTACKS.get("mjp_rounds")().estimated_seconds(views) < 1
    assert 3 < ATTACKS.get("idlg")().estimated_seconds(views) < 300
    large = [observe(build_model("deit_s", num_classes=8, weights="random"), photographs(224, 1))]
    assert ATTACKS.get("idlg")().estimated_seconds(large) > 300


def test_a_last_resort_takes_what_the_others_leave() -> None:
    """`feature_decoder` is faster than `patch_set`, and tells less."""
    view = observe(build_model("vit_mini_64_nope", num_classes=8, weights="random"), photographs(64, 1))
    faster, better = (ATTACKS.get(name)().estimated_seconds([view]) for name in ("feature_decoder", "patch_set"))
    assert faster < better
    first, everything = (select_attacks(["auto"], [view], ThreatModel(), budget=b) for b in (better + 3, 60.0))
    assert "patch_set" in first.chosen
    assert "beyond the budget" in first.left_out["feature_decoder"]
    assert list(everything.planned)[-1] == "feature_decoder"
