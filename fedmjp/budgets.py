"""Attacks built from their options: which settings they have, how long they search, how often they run.

Budgets are written as on a command line: `NAME=NUMBER` for one attack, a bare `NUMBER` for all that it applies to; and
settings as `NAME.key=value`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from attacks import ATTACKS, UsageError
from fedmjp.settings import split_entries, with_settings

if TYPE_CHECKING:
    from attacks import Attack

AUTO, ALL = "auto", "all"  # instead of names of attacks (`fedmjp.audit.suite`)
DEFAULT_BUDGET = 10.0  # seconds of one CPU core that the suite plans for each update
EVERY = ""  # the name under which a bare number is kept


def read_budget(entries: Sequence[str], option: str) -> dict[str, int]:
    """The numbers of a budget, by attack; a bare number under `EVERY`.

    Args:
        entries: such as ("20", "unmix=6").
        option: how the option is typed, for the message.

    Raises:
        UsageError: no number of at least 1, or no such attack.
    """
    found = {}
    for entry in entries:
        name, _, number = str(entry).rpartition("=")  # `flwr run` passes plain numbers
        if name:
            ATTACKS.check(name)
        if not number.isdigit() or int(number) < 1:
            raise UsageError(f"{option} takes NUMBER or ATTACK=NUMBER of at least 1, not {entry!r}")
        found[name] = int(number)
    return found


def read_attack_options(
    entries: Sequence[str], attacks: Sequence[str], option: str = "--attack-options"
) -> dict[str, dict[str, str]]:
    """The settings of attacks, by attack and name of the setting; `build_attack` reads the values.

    Args:
        entries: such as ("mjp_subspace.prior.strength=20", "dlg.steps=50"). A comma begins a new entry, but for a part
            without "=", which belongs to the value before it.
        attacks: the attacks that run.
        option: how the option is typed, for the message.

    Raises:
        UsageError: an entry of another form, no such attack, or one that does not run.
    """
    found: dict[str, dict[str, str]] = {}
    for part in split_entries(entries):
        place, equals, value = part.partition("=")
        name, dot, key = place.partition(".")
        if not (equals and dot and key):
            raise UsageError(f"{option} takes ATTACK.setting=value, not {part!r}")
        ATTACKS.check(name)
        if name not in attacks:
            raise UsageError(f"{option} {part}: {name} does not run; choose from: {', '.join(attacks)}")
        found.setdefault(name, {})[key] = value
    return found


def searches(name: str) -> bool:
    """Whether the attack takes a number of steps."""
    return "steps" in {f.name for f in fields(ATTACKS.get(name))}


def steps_of(name: str, budget: Mapping[str, int]) -> dict[str, int]:
    """The setting `steps` of the attack, where it has one and the budget names a number for it."""
    asked = budget.get(name, budget.get(EVERY))
    return {"steps": asked} if asked and searches(name) else {}


def build_attack(name: str, settings: Mapping[str, Any] | None = None) -> Attack:
    """The attack called `name`.

    Args:
        settings: dotted names of its fields -> values, or text that is read as the field's type
            (`{"prior.strength": "20"}`); all others have their defaults.

    Raises:
        UsageError: no such attack or setting, or text that is not of the setting's type.
    """
    return with_settings(ATTACKS.get(name)(), settings or {}, f"attack {name!r}")


def attack_settings(
    attacks: Sequence[str], steps: Sequence[str] = (), options: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """The settings given for attacks, by attack; `build_attack` reads their values.

    Args:
        attacks: names, `AUTO` or `ALL`.
        steps: a budget (`read_budget`) of the attacks that search.
        options: settings (`read_attack_options`), which count more than `steps`.

    Raises:
        UsageError: no such attack, or one that does not run.
    """
    numbers = read_budget(steps, "--steps")
    choices = ATTACKS.names() if {AUTO, ALL} & set(attacks) else attacks
    found: dict[str, dict[str, Any]] = dict(read_attack_options(options, choices))
    for name in choices if numbers else ():
        found[name] = {**steps_of(name, numbers), **found.get(name, {})}
    return found


def read_seconds(text: str, option: str) -> float:
    """A time such as "10s", "2m" or "1h" in seconds; a bare number is in seconds.

    Args:
        option: how the option is typed, for the message.

    Raises:
        UsageError: no such time.
    """
    number, unit = re.fullmatch(r"([0-9.]*)(.*)", str(text).strip(), re.DOTALL).groups()
    try:
        return float(number) * {"": 1, "s": 1, "m": 60, "h": 3600}[unit]
    except (ValueError, KeyError):
        raise UsageError(f"{option} takes a time such as 10s, 2m or 1h, not {text!r}") from None


def named_attacks(attacks: Sequence[str | Attack]) -> list[tuple[str, Attack]]:
    """(name for rows, attack) of attacks given by name or as instances.

    An instance has the name that its class is registered under, or the name of its class.

    Raises:
        UsageError: no attack of that name.
    """
    return [
        (a, build_attack(a)) if isinstance(a, str) else (ATTACKS.name_of(type(a)) or type(a).__name__, a)
        for a in attacks
    ]


def spread_evenly(updates: Sequence[tuple[int, int]], limit: int | None) -> list[tuple[int, int]]:
    """At most `limit` of the audited updates, spread evenly over rounds and clients, the first and the last among them.

    Args:
        updates: (round, client) in their order.
        limit: None for no limit.
    """
    if limit is None or limit >= len(updates):
        return list(updates)
    if limit == 1:
        return [updates[-1]]
    last = len(updates) - 1
    return [updates[round(index * last / (limit - 1))] for index in range(limit)]
