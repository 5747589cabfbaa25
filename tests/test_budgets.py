"""Which settings attacks have, how often they run, and which updates they get."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from attacks import UsageError
from attacks.closed_form.april import April
from attacks.mjp.subspace import MJPSubspace
from fedmjp import simulate
from fedmjp.budgets import (
    EVERY,
    attack_settings,
    build_attack,
    named_attacks,
    read_attack_options,
    read_budget,
    read_seconds,
    spread_evenly,
    steps_of,
)
from fedmjp.config import from_flat

UPDATES = [(number, client) for number in (1, 5, 9) for client in range(4)]


def test_reading() -> None:
    assert read_budget(("20", "unmix=6"), "--steps") == {EVERY: 20, "unmix": 6}
    for wrong in ("unmix", "unmix=0", "-3", "unmix=two"):
        with pytest.raises(UsageError, match="--steps takes NUMBER or ATTACK=NUMBER"):
            read_budget((wrong,), "--steps")
    with pytest.raises(UsageError, match="did you mean 'unmix'"):
        read_budget(("unmixx=2",), "--steps")


@pytest.mark.parametrize(("text", "seconds"), [("10s", 10), ("2m", 120), ("1h", 3600), ("0.5", 0.5)])
def test_times(text: str, seconds: float) -> None:
    assert read_seconds(text, "--budget") == seconds


@pytest.mark.parametrize("text", ["", "soon", "10 s", "1.2.3s", "-1s"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(UsageError, match="--budget takes a time such as 10s, 2m or 1h"):
        read_seconds(text, "--budget")


def test_settings_of_attacks_by_name_and_of_all() -> None:
    given = attack_settings(("dlg", "april"), ("7",), ("dlg.restarts=2",))
    assert given == {"dlg": {"steps": 7, "restarts": "2"}, "april": {}}
    every = attack_settings(("all",), ("gradvit=3",))
    assert every["gradvit"] == {"steps": 3}
    assert {name for name, settings in every.items() if settings} == {"gradvit"}
    with pytest.raises(UsageError, match="dlg does not run"):
        attack_settings(("april",), options=("dlg.steps=2",))


def test_steps_reach_searches_only() -> None:
    budget = {EVERY: 20, "dlg": 3}
    assert [
        build_attack(name, steps_of(name, budget)).parameters().get("steps") for name in ("gradvit", "dlg", "april")
    ] == [20, 3, None]


def test_settings_are_read_as_their_types() -> None:
    prior = {"prior.strength": "20", "prior.smoothing": "none,0.1", "prior.iterations": 7}
    built = build_attack("mjp_subspace", prior).prior
    assert (built.strength, built.smoothing, built.iterations) == (20.0, (None, 0.1), 7)
    assert build_attack("gradvit", {"init": "zeros", "tv": "1e-3"}).parameters()["tv"] == 0.001


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("dlg", {"stepz": "3"}, "attack 'dlg' has no setting 'stepz' (did you mean 'steps'?); choose from: steps, "),
        ("dlg", {"steps": "many"}, "steps of attack 'dlg' takes a whole number, not 'many'"),
        ("dlg", {"on_step": "print"}, "has no setting 'on_step'"),
        ("mjp_subspace", {"prior": "3"}, "has no setting 'prior'"),
        ("mjp_subspace", {"prior.smoothing": "a"}, "(with commas or spaces), not 'a'"),
        ("april", {"steps": "3"}, "attack 'april' has no setting 'steps'; it has none"),
        ("aprill", {}, "did you mean 'april'"),
    ],
)
def test_settings_that_an_attack_does_not_have(name: str, settings: dict, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        build_attack(name, settings)


def test_attack_options_by_attack() -> None:
    entries = ("mjp_subspace.prior.smoothing=none,0.1,dlg.steps=5", "dlg.seed=1")
    found = read_attack_options(entries, ("dlg", "mjp_subspace"))
    assert found == {"mjp_subspace": {"prior.smoothing": "none,0.1"}, "dlg": {"steps": "5", "seed": "1"}}
    for wrong, words in {
        "dlg": "takes ATTACK.setting=value, not 'dlg'",
        "steps=3": "takes ATTACK.setting=value",
        "dlgg.steps=3": "did you mean 'dlg'",
        "april.x=3": "april does not run; choose from: dlg",
    }.items():
        with pytest.raises(UsageError, match=words):
            read_attack_options((wrong,), ("dlg",))


def test_steps_are_short_for_a_setting() -> None:
    config = from_flat({"attacks": "dlg,gradvit", "steps": "20", "attack_options": "dlg.steps=3,gradvit.tv=0.5"})
    settings = config.attack_settings()
    dlg, gradvit = (build_attack(name, settings[name]) for name in ("dlg", "gradvit"))
    assert (dlg.steps, gradvit.steps, gradvit.tv) == (3, 20, 0.5)


def test_names_of_instances() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine(April):
        """An attack that nobody has registered."""

    named = named_attacks(["april", MJPSubspace(), Mine()])
    assert [name for name, _ in named] == ["april", "mjp_subspace", "Mine"]
    assert isinstance(named[0][1], April)


def test_a_budget_is_spread_evenly() -> None:
    assert spread_evenly(UPDATES, None) == spread_evenly(UPDATES, 50) == UPDATES
    assert spread_evenly(UPDATES, 1) == [(9, 3)]
    assert spread_evenly(UPDATES, 2) == [(1, 0), (9, 3)]
    four = spread_evenly(UPDATES, 4)
    assert len(set(four)) == 4
    assert {number for number, _ in four} == {1, 5, 9}


def test_options_survive_the_way_of_flwr_run() -> None:
    config = from_flat({"steps": "20,dlg=3", "at_most": 2, "rounds": 9, "audit_rounds": "1,9"})
    settings = config.attack_settings()
    assert settings["dlg"]["steps"] == 3
    assert settings["gradvit"]["steps"] == 20
    assert len(config.attacked("april")) == 2
    assert len(config.attacked("mean_image")) == 8


def test_a_run_evaluates_and_attacks_as_often_as_asked(tmp_path) -> None:
    out = tmp_path / "run"
    options = ["--model", "vit_mini_32", "--weights", "random", "--clients", "3", "--rounds", "3", "--test-limit", "4"]
    options += ["--attacks", "patch_embedding", "dlg", "--at-most", "dlg=1", "--steps", "2", "--evaluate-every", "2"]
    assert simulate.main([*options, "--audit-rounds", "1", "3", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    places = {name: [(r["round"], r["client"]) for r in rows if r["attack"] == name] for name in ("dlg", "mean_image")}
    assert places["dlg"] == [(3, 2)]
    assert len(places["mean_image"]) == 6
    assert {r["attack_parameters"]["steps"] for r in rows if r["attack"] == "dlg"} == {2}
    evaluated = [line.split(",")[1] for line in (out / "rounds.csv").read_text().splitlines()[1:]]
    assert evaluated == ["0", "2", "3"]
