"""The options of all defences as one dataclass, from which command lines are made.

A defence brings its options by being registered. An option has the name of its field; where that name is taken, by
another option of the command or by a defence before it, it carries its defence's name (`--toy.gamma`). The spelling is
the same on command lines, in `flwr run --run-config` and in `from_flat`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import Field, field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any, get_type_hints

import tyro

from attacks.registry import UsageError
from fedmjp.defenses import DEFENSES, Defense
from fedmjp.defenses.chain import split_chain


def defense_options(taken: Collection[str]) -> type:
    """A dataclass with one field a defence, each an instance with its options at their defaults.

    Defences of other packages that cannot be imported are left out; `DEFENSES.get` says why.

    Args:
        taken: names of the command's other options (`option_names`).

    Returns:
        The class; its attribute `places` maps each option's name to (defence, field).
    """
    places: dict[str, tuple[str, str]] = {}
    groups = []
    for name, defence in DEFENSES.available().items():
        renamed = []
        for option in fields(defence):
            clash = option.name in taken or option.name in places
            places[f"{name}.{option.name}" if clash else option.name] = name, option.name
            renamed += [option] if clash else []
        kind = _with_prefix(defence, name, renamed) if renamed else defence
        groups.append((name, kind, field(default_factory=kind)))
    space = {"__doc__": "Options of the defences.", "places": places}
    return make_dataclass("DefenseOptions", groups, frozen=True, namespace=space)


def require_used(options: Any, entries: Iterable[str]) -> None:
    """Refuse options that were given for defences that do not run, which would change nothing.

    Args:
        options: what a command line gave, an instance of `defense_options`.
        entries: the entries of --defense.

    Raises:
        UsageError: an option differs from its default, and no entry names its defence; the message names both.
    """
    running, defaults = {name for entry in entries for name, _ in split_chain(entry)}, type(options)()
    for option, (name, attribute) in options.places.items():
        given, default = (getattr(getattr(group, name), attribute) for group in (options, defaults))
        if name not in running and given != default:
            flag = f"--{option.replace('_', '-')}"
            raise UsageError(
                f"{flag} is an option of --defense {name}, which does not run; name it there, or drop {flag}"
            )


def option_names(config: type) -> list[str]:
    """Names of all fields of a command's dataclass and of the dataclasses in it, but for the defences' (`options`)."""
    names = []
    for entry in fields(config):
        if entry.name == "options":
            continue
        kind = _kind_of(entry)
        names += option_names(kind) if is_dataclass(kind) else [entry.name]
    return names


def _kind_of(entry: Field) -> Any:
    """Class of the entry's default."""
    return type(entry.default_factory() if callable(entry.default_factory) else entry.default)


def _with_prefix(defence: type[Defense], name: str, options: list[Field]) -> type[Defense]:
    """A subclass whose `options` are called "name.option" on the command line, and the same otherwise."""
    hints, notes = get_type_hints(defence, include_extras=True), []
    for option in options:
        called = tyro.conf.arg(name=f"{name}.{option.name}")
        default = option.default_factory if callable(option.default_factory) else option.default
        new = field(default_factory=default) if callable(option.default_factory) else field(default=default)
        notes.append((option.name, Annotated[hints[option.name], called], new))
    space = {"__doc__": defence.__doc__, "__module__": defence.__module__}
    return make_dataclass(defence.__name__, notes, bases=(defence,), frozen=True, namespace=space)
