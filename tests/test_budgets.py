"""How often attacks run: reading budgets, and which updates they get."""

from __future__ import annotations

import json

import pytest

from attacks import UsageError
from fedmjp import simulate
from fedmjp.budgets import EVERY, build_attack, read_budget, spread_evenly, steps_of
from fedmjp.config import from_flat

UPDATES = [(number, client) for number in (1, 5, 9) for client in range(4)]


def test_reading() -> None:
    assert read_budget(("20", "unmix=6"), "--steps") == {EVERY: 20, "unmix": 6}
    for wrong in ("unmix", "unmix=0", "-3", "unmix=two"):
        with pytest.raises(UsageError, match="--steps takes NUMBER or ATTACK=NUMBER"):
            read_budget((wrong,), "--steps")
    with pytest.raises(UsageError, match="did you mean 'unmix'"):
        read_budget(("unmixx=2",), "--steps")


def test_steps_reach_searches_only() -> None:
    budget = {EVERY: 20, "dlg": 3}
    assert [
        build_attack(name, steps_of(name, budget)).parameters().get("steps") for name in ("gradvit", "dlg", "april")
    ] == [20, 3, None]


def test_a_budget_is_spread_evenly() -> None:
    assert spread_evenly(UPDATES, None) == spread_evenly(UPDATES, 50) == UPDATES
    assert spread_evenly(UPDATES, 1) == [(9, 3)]
    assert spread_evenly(UPDATES, 2) == [(1, 0), (9, 3)]
    four = spread_evenly(UPDATES, 4)
    assert len(set(four)) == 4
    assert {number for number, _ in four} == {1, 5, 9}


def test_options_survive_the_way_of_flwr_run() -> None:
    config = from_flat({"steps": "20,dlg=3", "at_most": 2, "rounds": 9, "audit_rounds": "1,9"})
    assert config.attack("dlg").steps == 3
    assert config.attack("gradvit").steps == 20
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
