"""Groups of parameters that a client may leave out of its update, as the rows of the table call them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attacks import Observation
from attacks.registry import UsageError
from fedmjp.defenses import Defense
from fedmjp.defenses.withheld import Withheld

# Row of the table -> the defence whose frozen parameters are left out.
GROUPS: dict[str, Defense] = {
    "nothing": Defense(),
    "position embedding": Withheld(withhold=("positions",)),
    "patch projection": Withheld(withhold=("patch_projection",)),
    "positions and projection": Withheld(withhold=("positions", "patch_projection")),
    "first query, key, value": Withheld(withhold=("first_attention",)),
    "positions and first attention": Withheld(withhold=("positions", "first_attention")),
    "first block": Withheld(withhold=("first_block",)),
    "positions and first block": Withheld(withhold=("positions", "first_block")),
    "all before block 3": Withheld(withhold=("cls_token", "positions", "patch_projection", "blocks.[01].*")),
    "all before block 5": Withheld(withhold=("cls_token", "positions", "patch_projection", "blocks.[0123].*")),
    "all but biases and classifier": Withheld(train_only=("biases", "head")),
    "all but norms and classifier": Withheld(train_only=("norms", "head")),
    "all but the classifier": Withheld(train_only=("head",)),
}


def chosen(groups: Sequence[str]) -> tuple[str, ...]:
    """The groups that --groups names.

    Raises:
        UsageError: there is no such group.
    """
    found, rest = [], ",".join(groups)  # a command line is split at commas, which a group's name may hold
    while rest:
        begun = [name for name in GROUPS if f"{rest},".startswith(f"{name},")]
        if not begun:
            raise UsageError(f"--groups {rest.split(',')[0]!r}: choose from: {', '.join(map(repr, GROUPS))}")
        found.append(max(begun, key=len))
        rest = rest[len(found[-1]) + 1 :]
    return tuple(found)


def without(observation: Observation, group: str) -> Observation:
    """The update without the parameters of a group."""
    gone = GROUPS[group].freezes
    return replace(observation, gradients={n: g for n, g in observation.gradients.items() if not gone(n)})
