"""Dataclasses from plain values, and their fields changed by name, with text: settings of attacks and flat options.

A name is dotted where a field is a dataclass itself (`prior.strength`). Text is read as the field's type hint says:
numbers, words, true or false, none, and tuples with commas or spaces.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from attacks.registry import UsageError

T = TypeVar("T")

PLAIN = {int: "a whole number", float: "a number", str: "a word", Path: "a path", bool: "true or false"}


def with_settings(instance: T, settings: Mapping[str, Any], owner: str) -> T:
    """A copy of a dataclass instance with other values in some of its fields.

    Args:
        instance: its fields may be dataclasses themselves.
        settings: dotted field name -> text, which is read, or a value of another type, which is taken as it is.
        owner: what the settings belong to, for messages, such as "attack 'dlg'".

    Raises:
        UsageError: no such field, or text that is not of its type; the message names the choices.
    """
    known = setting_types(instance)
    for name, value in settings.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            choices = f"choose from: {', '.join(known)}" if known else "it has none"
            raise UsageError(f"{owner} has no setting {name!r}{hint}; {choices}")
        if isinstance(value, str):
            try:
                value = read_value(value, known[name])
            except ValueError:
                raise UsageError(f"{name} of {owner} takes {describe(known[name])}, not {value!r}") from None
        instance = replace_at(instance, name.split("."), value)
    return instance


def split_entry(entry: str, flag: str) -> tuple[str, dict[str, str]]:
    """An entry "name" or "name:option=value,option=value" as its name and settings.

    Args:
        entry: as given for the option `flag`, which the message names.

    Raises:
        UsageError: a setting without a value.
    """
    name, _, text = entry.partition(":")
    settings = dict.fromkeys(split_entries([text]))
    for part in settings:
        if "=" not in part:
            raise UsageError(f"{flag} takes NAME or NAME:option=value, not {entry!r}")
    return name, dict(part.split("=", 1) for part in settings)


def split_entries(texts: Sequence[str]) -> list[str]:
    """Texts such as "a=1,b=2" cut at commas; a part without "=" belongs to the value before it ("a=1,2,b=3")."""
    entries: list[str] = []
    for part in (part for text in texts for part in text.split(",") if part):
        entries += [part] if "=" in part or not entries else [f"{entries.pop()},{part}"]
    return entries


def setting_types(instance: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> type hint of every field that can be given as text."""
    found, hints = {}, get_type_hints(type(instance))
    for field in fields(instance):
        value, name = getattr(instance, field.name), prefix + field.name
        if is_dataclass(value):
            found |= setting_types(value, name + ".")
        elif describe(hints[field.name]):
            found[name] = hints[field.name]
    return found


def replace_at(instance: T, path: list[str], value: Any) -> T:
    """A copy with `value` at the end of `path`, field by field."""
    name, *rest = path
    return replace(instance, **{name: replace_at(getattr(instance, name), rest, value) if rest else value})


def from_plain(cls: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass from nested plain values as JSON has them, restoring paths and tuples.

    Raises:
        UsageError: a name that is no field.
    """
    hints = get_type_hints(cls)
    built = {}
    for name, value in values.items():
        if name not in hints:
            raise UsageError(f"the configuration holds {name!r}, which is unknown here; is its package installed?")
        kind = hints[name]
        if is_dataclass(kind):
            value = from_plain(kind, value)
        elif isinstance(value, list):
            value = tuple(value)
        elif value is not None and kind in (Path, Path | None):
            value = Path(value)
        built[name] = value
    return cls(**built)


def read_value(text: str, kind: Any) -> Any:
    """The value of type `kind` that `text` stands for.

    Raises:
        ValueError: it stands for none.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _read_first(text, arguments)
    if origin is Literal:
        return next(c for c in arguments if str(c) == text) if text in map(str, arguments) else _refuse(text)
    if origin is tuple:
        parts = text.replace(",", " ").split()
        many = len(arguments) == 2 and arguments[1] is Ellipsis
        kinds = arguments[:1] * len(parts) if many else arguments
        return tuple(read_value(part, each) for part, each in zip(parts, kinds, strict=True))
    if kind is bool:
        return {"true": True, "false": False}[text.lower()] if text.lower() in ("true", "false") else _refuse(text)
    if kind is type(None):
        return None if text.lower() in ("none", "") else _refuse(text)
    return kind(text) if kind in PLAIN else _refuse(text)


def write_value(value: Any) -> str:
    """The text that `read_value` reads as this value."""
    if isinstance(value, tuple):
        return ",".join(map(write_value, value))
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def describe(kind: Any) -> str:
    """What `read_value` takes for a type, in words; "" for types that text cannot give."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        words = ["none" if a is type(None) else describe(a) for a in arguments]
        return " or ".join(words) if all(words) else ""
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is tuple:
        words = [describe(a) for a in arguments if a is not Ellipsis]
        return f"{' and '.join(words)} (with commas or spaces)" if all(words) else ""
    return PLAIN.get(kind, "")


def _read_first(text: str, kinds: tuple[Any, ...]) -> Any:
    """The value of the first type that takes the text, None before all others."""
    for kind in sorted(kinds, key=lambda kind: kind is not type(None)):
        try:
            return read_value(text, kind)
        except ValueError:
            continue
    return _refuse(text)


def _refuse(text: str) -> Any:
    raise ValueError(text)


def option_fields(cls: type, leave_out: str = "", path: Sequence[str] = ()) -> dict[str, tuple[list[str], Any]]:
    """Option name of every field of a dataclass and of those in it -> (the fields that lead to it, its type).

    Args:
        leave_out: a field whose own fields are left out.
        path: the fields that lead to `cls` itself.
    """
    found, full = {}, get_type_hints(cls, include_extras=True)
    for name, kind in get_type_hints(cls).items():
        if is_dataclass(kind):
            found |= option_fields(kind, leave_out, [*path, name]) if name != leave_out else {}
        else:
            found[_option_name(name, full[name])] = [*path, name], kind
    return found


def _option_name(field_name: str, hint: Any) -> str:
    """A field's name, or the one that tyro's `arg` gives it (--from, which no field of Python's can be called)."""
    given = (getattr(entry, "name", None) for entry in getattr(hint, "__metadata__", ()))
    return next(filter(None, given), field_name)
