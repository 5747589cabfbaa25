"""Errors that command lines answer with one line, and the one for an optional package that is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from attacks.registry import UsageError


class ClientFailure(RuntimeError):
    """A client failed or sent something unusable: the message names the client and the round."""


class MissingExtra(UsageError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


@contextmanager
def needs_extra(extra: str, purpose: str) -> Iterator[None]:
    """Imports inside the block belong to an optional dependency.

    Args:
        extra: of this package, as in `pip install 'fedmjp[extra]'`.
        purpose: what they are needed for, to begin the message with.

    Raises:
        MissingExtra: one of the imports finds no module.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"{purpose} needs the package {error.name!r}, which is not installed: pip install 'fedmjp[{extra}]'"
        ) from error


class Incomplete(Exception):
    """Results are written, and some that were asked for are not among them; the text is for the user."""
