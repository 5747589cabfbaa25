"""Names to things: the one mechanism behind attacks, defences, models, data sets and metrics.

It stands in `attacks` because that is the ground floor of the house: everything else may import it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class UsageError(ValueError):
    """A mistake of the caller, told in one line that says what to do; command lines exit with 2 on it."""


class Registry(Generic[T]):
    """A table of named entries that refuses duplicates and answers an unknown name with the choices.

    Args:
        kind: what an entry is called in messages, for example "attack".
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files its target under `name`.

        Raises:
            ValueError: the name is taken (two files claim it: a programming error, not a user's).
        """

        def file(entry: T) -> T:
            """Put the entry into the table and hand it back."""
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = entry
            return entry

        return file

    def get(self, name: str) -> T:
        """Return the entry called `name`.

        Raises:
            UsageError: no such name; the message lists the choices and the nearest one.
        """
        if name not in self._entries:
            near = difflib.get_close_matches(name, self._entries, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise UsageError(f"unknown {self.kind} {name!r}{hint}; choose from: {', '.join(self.names())}")
        return self._entries[name]

    def names(self) -> list[str]:
        """All names in the order of registration."""
        return list(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)
