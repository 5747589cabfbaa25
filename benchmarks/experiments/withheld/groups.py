"""Groups of parameters that a client may leave out of its update, as the rows of the table call them."""

from __future__ import annotations

from dataclasses import replace

from attacks import Observation
from fedmjp.defenses.parameter_groups import belongs

# Row of the table -> entries of `fedmjp.defenses.parameter_groups`.
GROUPS: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "position embedding": ("positions",),
    "patch projection": ("patch_projection",),
    "positions and projection": ("positions", "patch_projection"),
    "first query, key, value": ("first_attention",),
    "first block": ("first_block",),
    "positions and first block": ("positions", "first_block"),
    "all but the classifier": ("all_but_head",),
}


def without(observation: Observation, group: str) -> Observation:
    """The update without the parameters of a group."""
    gone = GROUPS[group]
    return replace(observation, gradients={n: g for n, g in observation.gradients.items() if not belongs(n, gone)})
