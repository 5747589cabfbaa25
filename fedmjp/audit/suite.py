"""Which attacks run on an update: the suite `auto`, `all`, or attacks by name.

`auto` has no parameters to tune, as AutoAttack's suite has none (Croce and Hein 2020). It takes every registered attack
that the threat model grants and that has something to add on the update, the fastest first and last resorts
(`Attack.last_resort`) at the end, as long as the sum of their estimated times stays below a budget. What is left out is
listed with its reason, because a verdict is only as good as the attacks behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attacks import ATTACKS, Attack, Observation, ThreatModel, UsageError
from attacks.active.base import ActiveAttack
from fedmjp.budgets import ALL, AUTO, DEFAULT_BUDGET, build_attack

OVERRUN = 1.2  # times the budget from which on it is said what took longer
BY_NAME_ONLY = "repeats another attack with another package; run it by name or with --attacks all"


@dataclass(frozen=True)
class Suite:
    """The attacks on one update.

    Attributes:
        chosen: name -> attack, in the order in which they run.
        left_out: name of every other registered attack -> why it does not run.
        planned: attack that `AUTO` chose -> the seconds of one CPU core that its formula gives.
    """

    chosen: Mapping[str, Attack]
    left_out: Mapping[str, str] = field(default_factory=dict)
    planned: Mapping[str, float] = field(default_factory=dict)

    def overrun(self, taken: Mapping[str, float], budget: float) -> str:
        """What took longer than planned, where the attacks of `AUTO` together exceeded the budget; else "".

        Attacks are chosen by formula, so that the same command runs the same ones on every machine; on a busy or slow
        one they take longer.

        Args:
            taken: attack -> wall-clock seconds.
        """
        own = {name: taken[name] for name in self.planned if name in taken}
        total = sum(own.values())
        if total <= OVERRUN * budget:
            return ""
        longest = max(own, key=lambda name: own[name] - self.planned[name])
        return (
            f"the attacks took {total:.0f} s, beyond the budget of {budget:g} s: {longest} took {own[longest]:.1f} s "
            f"where {self.planned[longest]:.1f} s of one idle CPU core were planned"
        )


def select_attacks(
    names: Sequence[str],
    observations: Sequence[Observation],
    threat_model: ThreatModel,
    *,
    budget: float = DEFAULT_BUDGET,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> Suite:
    """The attacks to run on the last of a client's updates.

    Args:
        names: `AUTO`, `ALL`, or names of attacks; they may be mixed (`auto` and a slow attack by name).
        observations: the client's updates, oldest first.
        threat_model: what the adversary is granted.
        budget: seconds of one CPU core that `auto` may plan for the update.
        settings: attack -> its settings (`build_attack`).

    Raises:
        UsageError: an attack asked for by name needs more than the threat model grants, or a setting that does not fit.
    """
    settings = settings or {}
    named = [name for name in names if name not in (AUTO, ALL)]
    chosen = {name: build_attack(name, settings.get(name)).granted(threat_model) for name in named}
    for name, attack in chosen.items():
        attack.require(threat_model, name)
    left_out: dict[str, str] = {}
    candidates: dict[str, Attack] = {}
    for name in ATTACKS:
        if name in chosen:
            continue
        try:
            # Before anything is built: what runs by name only may need a package that takes seconds to import.
            if ALL not in names and not (AUTO in names and ATTACKS.get(name).in_suite):
                left_out[name] = BY_NAME_ONLY if AUTO in names else "not among --attacks"
                continue
            attack = build_attack(name, settings.get(name)).granted(threat_model)
            attack.require(threat_model, name)
        except UsageError as error:  # a capability that is not granted, or a package that is not installed
            left_out[name] = str(error)
            continue
        candidates[name] = attack
    planned = {} if ALL in names else _within_budget(candidates, observations, budget, left_out)
    chosen |= candidates if ALL in names else {name: candidates[name] for name in planned}
    return Suite(chosen, {name: left_out[name] for name in ATTACKS if name in left_out}, planned)


def active_attack(
    names: Sequence[str], settings: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[str, ActiveAttack] | None:
    """The attack among `names` that chooses what clients are sent, with its name; None without one.

    Args:
        names: as for `select_attacks`; `AUTO` and `ALL` send what an honest server sends.
        settings: attack -> its settings (`build_attack`).

    Raises:
        UsageError: several, of which a client could be sent what only one sets.
    """
    found = [n for n in names if n not in (AUTO, ALL) and issubclass(ATTACKS.get(n), ActiveAttack)]
    if len(found) > 1:
        raise UsageError(f"--attacks takes one attack that chooses what clients are sent, not {' and '.join(found)}")
    return (found[0], build_attack(found[0], (settings or {}).get(found[0]))) if found else None


def _within_budget(
    candidates: Mapping[str, Attack], observations: Sequence[Observation], budget: float, left_out: dict[str, str]
) -> dict[str, float]:
    """Estimated seconds of those that `auto` runs, in their order; the reasons of the others go to `left_out`."""
    seconds: dict[str, float] = {}
    for name, attack in candidates.items():
        read = attack.as_read(observations)
        reason = attack.misfit(read) or attack.obstacle(read)
        if reason:
            left_out[name] = reason
        else:
            seconds[name] = attack.estimated_seconds(read)
    planned, spent = {}, 0.0
    for name in sorted(seconds, key=lambda name: (candidates[name].last_resort, seconds[name])):
        if spent + seconds[name] > budget:
            left_out[name] = (
                f"takes about {seconds[name]:.0f} s, beyond the budget of {budget:g} s an update (--budget)"
            )
        else:
            planned[name], spent = seconds[name], spent + seconds[name]
    return planned
