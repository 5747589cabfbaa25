"""Registries: tables of attacks, defences, models and data sets by name.

An entry is an object, or a reference "module:attribute" that is imported when the entry is asked for; the names of a
registry are known without importing anything. Other packages add references through entry points of the registry's
group (`importlib.metadata`, the same "module:attribute" form). This module imports nothing but the standard library.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class UsageError(ValueError):
    """A mistake of the caller; the message is one line that says what to do, and command lines exit with 2 on it."""


@dataclass(frozen=True)
class _Source:
    """Where an entry comes from.

    Attributes:
        reference: "module:attribute"; "" for an object that has no name of its own, such as a configuration.
        package: the distribution whose entry point this is; "" for built-in and registered entries.
    """

    reference: str
    package: str = ""

    def __str__(self) -> str:
        return f"{self.reference or 'an object'}{f' of package {self.package}' if self.package else ''}"


class Registry(Generic[T]):
    """A table of named entries that refuses duplicates and answers an unknown name with the choices.

    Args:
        kind: what an entry is called in messages, for example "attack".
        references: the built-in entries, name -> "module:attribute".
        group: group of entry points through which installed packages add entries, or "" for none.
        base: "module:attribute" of the class that an entry of another package must be a subclass of, or "" for any.
    """

    def __init__(self, kind: str, references: Mapping[str, str] | None = None, group: str = "", base: str = "") -> None:
        self.kind, self.group, self.base = kind, group, base
        self._sources: dict[str, list[_Source]] = {n: [_Source(r)] for n, r in (references or {}).items()}
        self._built_in = frozenset(self._sources)
        self._entries: dict[str, T] = {}
        self._unread = bool(group)

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that enters its target under `name`; a class defined again under its own name replaces the former.

        Raises:
            ValueError: another entry has the name (the message names both), or it is no identifier in a registry that
                other packages may extend.
        """

        def enter(entry: T) -> T:
            """Enter the target and return it."""
            source, sources = _Source(_reference_of(entry)), self._read()
            if self.group and not name.isidentifier():
                raise ValueError(f"{self.kind} {name!r}: a name has letters, digits and underscores only")
            if name in sources and not (source.reference and source.reference == sources[name][0].reference):
                raise ValueError(f"{self.kind} {name!r} is registered twice: {sources[name][0]} and {source}")
            sources.setdefault(name, [source])
            self._entries[name] = entry
            return entry

        return enter

    def get(self, name: str) -> T:
        """Return the entry called `name`, importing it if need be.

        Raises:
            UsageError: no such name (the message lists the choices and the nearest one); a name that two packages
                claim; an entry of another package that cannot be imported or is not what it should be.
        """
        self.check(name)
        if name not in self._entries:
            entry = self._load(name, self._sources[name][0])
            self._entries.setdefault(name, entry)  # the import may have registered it already
        return self._entries[name]

    def check(self, name: str) -> None:
        """Check that `name` is an entry's, without importing the entry.

        Raises:
            UsageError: no such name, or one that two packages claim.
        """
        sources = self._read()
        if name not in sources:
            near = difflib.get_close_matches(name, sources, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise UsageError(f"unknown {self.kind} {name!r}{hint}; choose from: {', '.join(self.names())}")
        if len(sources[name]) > 1:
            claims = " and ".join(str(source) for source in sources[name])
            raise UsageError(f"{self.kind} {name!r} is claimed by {claims}; uninstall one of them or rename its entry")

    def names(self) -> list[str]:
        """All names: the built-in ones in the order of their table, then those of other packages, then registered."""
        return list(self._read())

    def available(self) -> dict[str, T]:
        """The entries by name, but for those of other packages that `get` refuses."""
        found = {}
        for name in self:
            with suppress(UsageError):
                found[name] = self.get(name)
        return found

    def is_built_in(self, name: str) -> bool:
        """Whether the entry is neither another package's nor one that `register` has added."""
        return name in self._built_in

    def name_of(self, entry: T) -> str | None:
        """The name under which `entry` stands here, or None."""
        reference = _reference_of(entry)
        named = (n for n, s in self._read().items() if self._entries.get(n) is entry or s[0].reference == reference)
        return next(named, None) if reference else None

    def __contains__(self, name: str) -> bool:
        return name in self._read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def _read(self) -> dict[str, list[_Source]]:
        """The sources by name, after reading the entry points once."""
        if self._unread:
            self._unread = False
            for point in sorted(entry_points(group=self.group), key=lambda point: point.name):
                sources = self._sources.setdefault(point.name, [])
                if point.value not in [source.reference for source in sources]:
                    sources.append(_Source(point.value, point.dist.name if point.dist else "unknown"))
        return self._sources

    def _load(self, name: str, source: _Source) -> T:
        if not source.package:
            return _imported(source.reference)
        try:
            entry = _imported(source.reference)
        except Exception as error:  # whatever another package's code raises
            what = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
            raise UsageError(f"{self.kind} {name!r} ({source}) cannot be imported: {what}") from error
        if not name.isidentifier():
            raise UsageError(f"{self.kind} {name!r} ({source}): a name has letters, digits and underscores only")
        if self.base and not (isinstance(entry, type) and issubclass(entry, _imported(self.base))):
            raise UsageError(f"{self.kind} {name!r} ({source}) is no subclass of {self.base.replace(':', '.')}")
        return entry


def _imported(reference: str) -> Any:
    module, _, attributes = reference.partition(":")
    found = import_module(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute)
    return found


def _reference_of(entry: Any) -> str:
    name = getattr(entry, "__qualname__", "")
    return f"{entry.__module__}:{name}" if name else ""
