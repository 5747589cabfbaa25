"""Every situation of the table, by group and name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from experiments.situations.answers import Answer
from experiments.situations.commands import COMMANDS
from experiments.situations.flower import FLOWER
from experiments.situations.gradients import GRADIENTS

Situations = Mapping[str, tuple[str, Callable[[], Answer]]]  # name -> (what is done, a function that does it)
GROUPS: Mapping[str, Situations] = {
    "python -m fedmjp.simulate": COMMANDS,
    "audit_gradient": GRADIENTS,
    "Watcher": FLOWER,
}
CASES: Situations = {name: case for group in GROUPS.values() for name, case in group.items()}
