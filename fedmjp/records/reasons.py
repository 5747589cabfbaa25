"""Reasons and diagnoses put together where they differ only in their numbers, so that each is read once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)")


def in_one_sentence(texts: Iterable[str]) -> str:
    """Texts that differ only in numbers as one text, with "3 to 7" where the numbers differ.

    Args:
        texts: at least one; all have the same words, as those of one group of `grouped` do.
    """
    texts = list(texts)
    places = zip(*(_NUMBER.findall(text) for text in texts), strict=True)
    spans = iter([_span(sorted(set(numbers), key=float)) for numbers in places])
    return _NUMBER.sub(lambda _: next(spans), texts[0])


def grouped(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """Reason -> the names that give it, in order of first appearance.

    Args:
        reasons: name -> reason. Reasons that differ only in numbers are one (`in_one_sentence`).
    """
    alike: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        alike.setdefault(pattern(reason), []).append(name)
    return {in_one_sentence(reasons[name] for name in names): names for names in alike.values()}


def pattern(text: str) -> str:
    """The text without its numbers: equal for texts that differ in nothing else."""
    return _NUMBER.sub("#", text)


def _span(numbers: list[str]) -> str:
    return numbers[0] if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
