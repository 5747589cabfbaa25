"""Several defences that act one after the other, `--defense mjp+noise`, and the reading of such entries.

An entry is NAME, NAME:option=value,option=value, or several of these joined by "+", in the order in which they act: on
the model, on the input and on the update. Several values of one option have spaces between them, or commas where the
entry stands alone (a list of entries is cut at commas). Two defences that both move patches, or that both compute the
gradient of a step, do not go together and are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from attacks.registry import UsageError
from fedmjp.defenses import DEFENSES
from fedmjp.defenses.base import ClientInput, Defense
from fedmjp.settings import split_entry, with_settings

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fedmjp.data.augmentations import Augmentation
    from fedmjp.defenses.privacy import Schedule
    from fedmjp.defenses.step import LocalStep
    from fedmjp.models import BuiltModel
    from fedmjp.objectives import Objective

JOINT = re.compile(r"\+(?=[A-Za-z_]\w*(?:[:+]|$))")  # a "+" before a name, not one in a number such as 1e+3


@dataclass(frozen=True)
class Chain(Defense):
    """Defences in the order in which they act.

    Attributes:
        parts: (name, defence), at least two.
    """

    parts: tuple[tuple[str, Defense], ...] = ()

    @property
    def random(self) -> bool:
        """Whether a part is random."""
        return any(part.random for _, part in self.parts)

    @property
    def moves_patches(self) -> bool:
        """Whether a part moves patches."""
        return any(part.moves_patches for _, part in self.parts)

    @property
    def hides_positions(self) -> bool:
        """Whether a part hides positions."""
        return any(part.hides_positions for _, part in self.parts)

    @property
    def remembers(self) -> bool:
        """Whether a part remembers."""
        return any(part.remembers for _, part in self.parts)

    @property
    def adapts(self) -> bool:
        """Whether a part changes the model's layers."""
        return any(part.adapts for _, part in self.parts)

    @property
    def acts_on_update(self) -> bool:
        """Whether a part acts on the update."""
        return any(part.acts_on_update for _, part in self.parts)

    @property
    def known_by(self) -> tuple[str, ...]:
        """The attacks that take every part into account."""
        first, *others = ((*part.known_by, *part.known_beside_others) for _, part in self.parts)
        return tuple(name for name in first if all(name in other for other in others))

    @property
    def dal(self) -> str:
        """Map of the localisation loss of the part that has one, "none" if none has."""
        return next((part.dal for _, part in self.parts if hasattr(part, "dal")), "none")

    def parameters(self) -> dict[str, Any]:
        """The options of all parts as rows hold them, by "name.option"."""
        return {f"{name}.{option}": v for name, part in self.parts for option, v in part.parameters().items()}

    def validate(self) -> None:
        """Check every part, and that they go together.

        Raises:
            UsageError: options out of range, a part named twice, or two that move patches or compute the gradient of a
                step.
        """
        names = [name for name, _ in self.parts]
        twice = next((name for name in names if names.count(name) > 1), "")
        if twice:
            raise UsageError(f"--defense {'+'.join(names)} names {twice} twice; name each defence of a chain once")
        if "none" in names:
            raise UsageError(f"--defense {'+'.join(names)}: none is no defence; leave it out of the chain")
        own_gradient = [name for name, part in self.parts if type(part).gradients is not Defense.gradients]
        movers = [name for name, part in self.parts if part.moves_patches]
        for both, what in ((own_gradient, "compute the gradient of a step"), (movers, "move patches")):
            if len(both) > 1:
                raise UsageError(f"--defense {'+'.join(names)}: {' and '.join(both)} both {what}; keep one of them")
        for _, part in self.parts:
            part.validate()

    def check(self, objective: Objective, augmentation: Augmentation | None) -> None:
        """See `Defense.check`, for every part."""
        for _, part in self.parts:
            part.check(objective, augmentation)

    def scheduled(self, schedule: Schedule) -> Chain:
        """Every part with what follows from the schedule."""
        return Chain(tuple((name, part.scheduled(schedule)) for name, part in self.parts))

    def guarantee(self, schedule: Schedule) -> str:
        """What the parts prove; what acts on their output does not weaken it."""
        return " ".join(filter(None, (part.guarantee(schedule) for _, part in self.parts)))

    def model_name(self, name: str) -> str:
        """The variant that the parts ask for, each from that of the part before it."""
        for _, part in self.parts:
            name = part.model_name(name)
        return name

    def adapt(self, module: nn.Module) -> None:
        """Change a new model, part by part."""
        for _, part in self.parts:
            part.adapt(module)

    def freezes(self, name: str) -> bool:
        """Whether a part freezes the parameter."""
        return any(part.freezes(name) for _, part in self.parts)

    def on_input(self, images: Tensor, model: BuiltModel, generator: torch.Generator, round: int) -> ClientInput:
        """Transform a batch, part by part; at most one part hides positions or moves patches."""
        seen = ClientInput(images)
        for _, part in self.parts:
            after = part.on_input(seen.images, model, generator, round)
            own = {name: value for name, value in vars(after).items() if name != "images" and value is not None}
            seen = replace(seen, images=after.images, **own)
        return seen

    def loss_weights(self) -> Mapping[str, float]:
        """The terms of all parts."""
        return {term: weight for _, part in self.parts for term, weight in part.loss_weights().items()}

    def gradients(self, step: LocalStep, generator: torch.Generator) -> dict[str, Tensor]:
        """The gradient as the one part computes it that does; else that of the mean loss."""
        own = (part for _, part in self.parts if type(part).gradients is not Defense.gradients)
        return next(own, Defense()).gradients(step, generator)

    def on_update(self, update: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Transform the update, part by part, without what clients remember."""
        return self.send(update, generator, {})[0]

    def send(
        self, update: dict[str, Tensor], generator: torch.Generator, memory: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Transform the update, part by part; each part has a memory of its own, named "PART/NAME"."""
        remembered: dict[str, Tensor] = {}
        for name, part in self.parts:
            own = {key.removeprefix(f"{name}/"): t for key, t in memory.items() if key.startswith(f"{name}/")}
            update, own = part.send(update, generator, own)
            remembered |= {f"{name}/{key}": t for key, t in own.items()}
        return update, remembered

    def known_noise(self, sent: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """The noise of the one part that changes what is sent; empty where several do."""
        acting = self._acting_alone()
        return {} if acting is None else acting.known_noise(sent, generator)

    def known_noise_of_step(
        self, trained: Mapping[str, Tensor], images: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """The noise of the one part that changes what is sent; empty where several do (clipping scales it)."""
        acting = self._acting_alone()
        return {} if acting is None else acting.known_noise_of_step(trained, images, generator)

    def _acting_alone(self) -> Defense | None:
        """The part that changes what is sent, if it is one."""
        acting = [part for _, part in self.parts if part.changes_values]
        return acting[0] if len(acting) == 1 else None

    def bits(self, sent: Mapping[str, Tensor]) -> int:
        """The shortest message that a part knows for the parameters that none freezes."""
        own = {name: tensor for name, tensor in sent.items() if not self.freezes(name)}
        return min(part.bits(own) for _, part in self.parts)


def split_chain(entry: str) -> list[tuple[str, dict[str, str]]]:
    """The defences of an entry as (name, settings), in order.

    Raises:
        UsageError: a setting without a value, or an empty part.
    """
    parts = JOINT.split(entry)
    if any(not part or part.endswith("+") for part in parts):
        raise UsageError(f"--defense takes NAME or NAME+NAME, each with :option=value where wanted, not {entry!r}")
    return [split_entry(part, "--defense") for part in parts]


def chain_name(entry: str) -> str:
    """The names of an entry's defences without their settings, joined by "+"."""
    return "+".join(name for name, _ in split_chain(entry))


@lru_cache
def known_defense(label: str) -> Defense | None:
    """The defence of a row's label, with its settings; None for a label that names none that is installed here."""
    try:
        return read_defense(label)
    except UsageError:
        return None


def defense_of_row(label: str, parameters: Mapping[str, Any]) -> Defense | None:
    """The defence of a row with the options that it ran with, wherever they were given; None as `known_defense`.

    Args:
        label: the row's column `defense`.
        parameters: its column `defense_parameters`.
    """
    defense = known_defense(label)
    if not isinstance(defense, Chain):
        return defense and _with_options(defense, parameters)
    own = {name: {} for name, _ in defense.parts}
    for key, value in parameters.items():
        name, _, option = key.partition(".")
        own.get(name, {})[option] = value
    return Chain(tuple((name, _with_options(part, own[name])) for name, part in defense.parts))


def _with_options(defense: Defense, values: Mapping[str, Any]) -> Defense:
    """A copy with these options, as JSON holds them; those that it does not have are left out."""
    names = {field.name for field in fields(defense)}
    read = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return replace(defense, **{name: value for name, value in read.items() if name in names})


def read_defense(entry: str, usual: Callable[[str], Defense | None] = lambda name: None) -> Defense:
    """The defence of an entry.

    Args:
        entry: see the module.
        usual: name -> the defence with the options that hold where the entry gives none; None for its defaults.

    Raises:
        UsageError: no such defence, one of another package that cannot be imported, or a setting that does not fit.
    """
    parts = []
    for name, settings in split_chain(entry):
        kind = DEFENSES.get(name)
        parts.append((name, with_settings(usual(name) or kind(), settings, f"defence {name!r}")))
    return parts[0][1] if len(parts) == 1 else Chain(tuple(parts))
