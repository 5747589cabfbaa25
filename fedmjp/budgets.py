"""How often and how long attacks run in a federation, where some take milliseconds an update and others minutes.

Both are written as on a command line: `NAME=NUMBER` for one attack, a bare `NUMBER` for all that it applies to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from attacks import ATTACKS, Attack, UsageError

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
        name, _, number = str(entry).rpartition("=")  # `flwr run` hands over plain numbers
        if name:
            ATTACKS.get(name)
        if not number.isdigit() or int(number) < 1:
            raise UsageError(f"{option} takes NUMBER or ATTACK=NUMBER of at least 1, not {entry!r}")
        found[name] = int(number)
    return found


def searches(name: str) -> bool:
    """Whether the attack takes a number of steps."""
    return "steps" in {f.name for f in fields(ATTACKS.get(name))}


def made(name: str, steps: Mapping[str, int]) -> Attack:
    """The attack, with its own number of steps where it takes one and the budget names one."""
    asked = steps.get(name, steps.get(EVERY))
    return ATTACKS.get(name)(**({"steps": asked} if asked and searches(name) else {}))


def chosen(updates: Sequence[tuple[int, int]], limit: int | None) -> list[tuple[int, int]]:
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
