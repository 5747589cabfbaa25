"""When a leaderboard's answer is a statement on a defence: rows made by hand, and what the protocol runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from attacks import ATTACKS, Capability
from attacks.active.base import ActiveAttack
from fedmjp.config import RunConfig
from fedmjp.defenses import DEFENSES
from fedmjp.leaderboard import measure, page, protocol
from fedmjp.leaderboard.cost import peak_bytes
from fedmjp.leaderboard.listing import submissions
from fedmjp.leaderboard.tiers import PASSIVE
from tests.audit.test_verdict import FAILED, GUESSES, NAN, frame
from tests.leaderboard.test_submissions import COMMITTED

NO_BETTER = [11.0, 13.0, 14.2, 12.0]  # than the guesses
UNTESTED, NOT_SHOWN = measure.UNTESTED, "no leak shown"


def rows_of(defense: str, updates: int, values: dict[str, list[float]], **more: Any) -> pd.DataFrame:
    """Rows of one tier and model after so many rounds."""
    rows = frame(GUESSES | values, **more)
    return rows.assign(defense=defense, defense_parameters=[{}] * len(rows), round=updates)


@pytest.mark.parametrize(
    ("rows", "answer", "ran"),
    [
        (rows_of("lora", 24, {"lora_span": NO_BETTER}), NOT_SHOWN, ["lora_span"]),
        (rows_of("lora", 23, {"lora_span": NO_BETTER}), UNTESTED, []),
        (rows_of("lora", 24, {"lora_span": [*NO_BETTER[:2], NAN, NAN]}), NOT_SHOWN, ["lora_span"]),
        (rows_of("lora", 24, {"lora_span": [11.0, NAN, NAN, NAN]}), UNTESTED, []),
        (rows_of("lora", 24, {"lora_span": NO_BETTER}, lora_span=FAILED), measure.INCONCLUSIVE, ["lora_span"]),
        (rows_of("lora", 24, {"patch_embedding": NO_BETTER}), UNTESTED, []),
        (rows_of("lora", 1, {"patch_embedding": [60.0] * 4}), "leaks", []),
        (rows_of("none", 1, {"patch_embedding": NO_BETTER}), NOT_SHOWN, []),
    ],
    ids=["tested", "too few updates", "half of the images", "few images", "assumptions", "unaware", "leaks", "none"],
)
def test_no_leak_shown_needs_an_attack_that_knows_the_defence(rows: pd.DataFrame, answer: str, ran: list[str]) -> None:
    found = measure.worst_line(rows, {})
    assert (found["answer"], found["adaptive_ran"]) == (answer, ran)
    assert found["headline"].startswith(answer)


def test_a_search_on_one_image_is_no_test() -> None:
    values = {"patch_embedding": [NAN] * 4, "inverting_gradients": [11.0, NAN, NAN, NAN]}
    rows = rows_of("adapters", 1, values)
    rows = rows[(rows["attack"] != "inverting_gradients") | rows["psnr"].notna()]
    found = measure.worst_line(rows, {})
    assert found["answer"] == UNTESTED
    assert found["held"]


@pytest.mark.parametrize("name", DEFENSES.names())
def test_attacks_that_know_a_defence_get_the_updates_that_they_want(name: str) -> None:
    knowing = [ATTACKS.get(attack) for attack in RunConfig().defence(name).known_by]
    joining = [a for a in knowing if Capability.SEVERAL_ROUNDS in a.needs and not issubclass(a, ActiveAttack)]
    several = next(tier for tier in PASSIVE if tier.several)
    rounds = protocol.layout(several, protocol.TRACKS["small"], RunConfig().defence(name).known_by).rounds
    assert rounds >= max([attack.updates_wanted for attack in joining], default=protocol.TRACKS["small"].rounds)
    assert all(attack.updates_wanted > 1 for attack in joining if attack.__name__ != "UnmixRounds")


@pytest.mark.parametrize(
    ("entry", "own"), [("lora", ["lora_trap"]), ("adapters+noise", ["adapter_trap"]), ("noise", [])]
)
def test_traps_are_set_for_those_who_train_what_they_read(entry: str, own: list[str]) -> None:
    parts = [part for part in protocol.parts(entry, protocol.TRACKS["small"], Path("x")) if part.prepared]
    everyone = ["fishing", "feature_fishing", "token_bins", *own, "imprint"]
    assert list(dict.fromkeys(part.prepared.attack for part in parts)) == everyone
    assert len(parts) == 2 * len(everyone)
    assert len({part.config.out for part in parts}) == len(parts)
    assert {part.config.federation.clients for part in parts if part.prepared.attack in own} <= {8}


def submission(entry: str, answer: str, *, ran: bool, recovered: int = 0, gain: float = 0.0) -> dict[str, Any]:
    """What the order of a page reads of a submission."""
    worst = {"tier": "t", "model": "m", "answer": answer, "recovered": recovered, "images": 8, "gain_mean": gain}
    worst |= {"adaptive_ran": ["a"] if ran else []}
    result = {"tier": "t", "model": "m", "worst": worst}
    return {"entry": entry, "file": entry, "comparable": True, "worst": worst, "results": [result]}


def test_the_untested_stand_last_unless_they_leak(monkeypatch) -> None:
    monkeypatch.setattr(protocol, "missing", lambda document: [])
    found = [
        submission("held", NOT_SHOWN, ran=True),
        submission("nobody", UNTESTED, ran=False),
        submission("unclear", measure.INCONCLUSIVE, ran=True),
        submission("patches", "partly", ran=True, gain=2.0),
        submission("unaware", "partly", ran=False, gain=9.0),
        submission("open", "leaks", ran=False, recovered=7, gain=50.0),
        submission("wide", "leaks", ran=True, recovered=8, gain=60.0),
        submission("none", "leaks", ran=False, recovered=8, gain=99.0),
    ]
    assert [one["entry"] for one in page.ordered(found)] == [
        *("none", "wide", "open", "patches", "unclear", "held"),
        *("unaware", "nobody"),
    ]
    words = {one["entry"]: page.answer_of(one) for one in found}
    assert words["unaware"] == f"partly; {UNTESTED}"
    assert (words["nobody"], words["patches"], words["open"]) == (UNTESTED, "partly", "leaks")


def test_a_submission_of_one_tier_stands_last_unless_it_leaks() -> None:
    """mjp with gamma 0.9, which leaks to unmix: with the federation of summed updates alone, and with that of one."""
    found = submissions(COMMITTED)
    whole = next(one for one in found if one["entry"] == "mjp:gamma=0.9")
    others = [one for one in found if one is not whole]

    def reduced(tier: str) -> dict[str, Any]:
        """The submission with one tier alone."""
        results = [result for result in whole["results"] if result["tier"] == tier]
        worst = measure.worst_of(results)
        return whole | {"results": results, "worst": {"tier": tier, "model": worst["model"], **worst["worst"]}}

    summed, several = reduced("aggregate_only"), reduced("passive_several")
    tested = [one for one in others if page.tested(one)]
    assert page.ordered([*tested, summed])[-1] is summed
    assert page.answer_of(summed) == f"{measure.INCONCLUSIVE}; only 1 of 15 federations"
    assert page.ordered([*others, several]).index(several) == page.ordered(found).index(whole)
    assert page.answer_of(several) == "leaks"


def test_of_several_rounds_an_image_has_the_rows_of_its_best_one() -> None:
    first = rows_of("none", 1, {"fishing": [90.0, NAN, 20.0, NAN]})
    second = rows_of("none", 2, {"fishing": [NAN, 80.0, 30.0, NAN]})
    kept = measure.best_round(pd.concat([first, second])).set_index(["attack", "image_id"])
    assert kept.loc["fishing", "round"].to_dict() == {"0": 1, "1": 2, "2": 2, "3": 1}
    assert kept.loc["fishing", "psnr"].fillna(-1).to_dict() == {"0": 90.0, "1": 80.0, "2": 30.0, "3": -1}
    assert kept.loc["mean_image", "round"].to_dict() == kept.loc["fishing", "round"].to_dict()
    assert not kept.index.has_duplicates


def test_attacks_of_several_federations_are_compared_on_the_photographs_they_share() -> None:
    """What three attacks found of four photographs, each in a federation of its own, is four images and not twelve."""
    first = rows_of("none", 3, {"fishing": [90.0, NAN, 20.0, NAN]})
    second = rows_of("none", 1, {"token_bins": [20.0, 80.0, NAN, NAN]}).assign(client=[*range(4)] * 3)
    rows = pd.concat([first, second[second["attack"] == "token_bins"]], ignore_index=True)
    found = measure.worst_line(rows, {})
    assert (found["images"], found["recovered"]) == (4, 2)
    assert measure.by_photograph(first) is first


def test_of_equally_exact_results_the_weaker_server_counts() -> None:
    exact = [submission("x", "leaks", ran=True, recovered=8, gain=gain)["results"][0] for gain in (60.0, 110.0, 30.0)]
    assert measure.worst_of(exact) is exact[0]
    assert measure.worst_of(exact[2:] + exact[:2]) is exact[0]


def test_every_figure_of_an_attack_has_an_interval_and_shares_are_wilsons() -> None:
    values = [float(v) for v in np.linspace(10, 80, 8)]
    rows = frame({"patch_embedding": values}, patch_embedding={"certified": True, "lpips": 0.5})
    rows = rows.assign(rank=[1.0] * 4 + [2.0] * 4)
    line = measure.attack_line("patch_embedding", rows)
    for name in ("psnr_mean", "psnr_median", "psnr_worst", "ssim", "lpips", "patches", "certified", "reidentified"):
        assert line[f"{name}_low"] <= line[name] <= line[f"{name}_high"], name
    assert (line["psnr_median"], line["psnr_worst"]) == (pytest.approx(45.0), pytest.approx(73.0))
    assert (line["certified"], line["certified_low"]) == (1.0, pytest.approx(8 / (8 + 1.96**2), abs=1e-3))
    assert (line["reidentified"], line["count"]) == (0.5, 8)


def test_peak_bytes_are_those_of_the_tensors_alive_together() -> None:
    kept = torch.zeros(1_000_000)

    def work() -> None:
        first = kept + 1  # 4 MB
        second = first * 2  # 8 MB
        del first
        torch.cat([second, second])  # 12 MB

    assert peak_bytes(work) == 12_000_000
