"""What a table of trained models measures: models, each with one training or several of the same recipe.

Of one training, intervals are over images. Of several, what is measured of each is one value, and intervals are
Student's over trainings; differences are paired in the order in which the files are named, by the seed that trained
both, and their signs are compared with the paper's (`experiments.trainings.seeds`, `verdicts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attacks.registry import UsageError


@dataclass(frozen=True)
class Subject:
    """A line of a table.

    Attributes:
        name: of the model with its variant, as `--model` takes it elsewhere.
        sources: of the weights, one a training.
    """

    name: str
    sources: tuple[str, ...]

    def require_single(self) -> None:
        """Raise `UsageError` unless there is one training."""
        if len(self.sources) > 1:
            raise UsageError(f"{self.name}: one training at a time here, not {len(self.sources)}; name one file")

    def require_pairs(self, reference: Subject) -> None:
        """Raise `UsageError` unless each training has its counterpart among those of `reference`."""
        if len(self.sources) != len(reference.sources):
            raise UsageError(
                f"{self.name} has {len(self.sources)} trainings, {reference.name} {len(reference.sources)}; "
                "differences are paired, name as many files of both"
            )


def read_subjects(entries: Sequence[str], also: Sequence[str] = ()) -> dict[str, Subject]:
    """Name -> subject, from entries `MODEL` or `MODEL=FILE`; several entries of a model are trainings of it.

    Args:
        also: what may stand in a file's place: `random` or `timm`.

    Raises:
        UsageError: a file given twice, an unknown model, or one without trained weights.
    """
    from fedmjp.models import split_name
    from fedmjp.models.weights import shipped_names

    found: dict[str, Subject] = {}
    for entry in entries:
        name, _, file = entry.partition("=")
        source = file or "auto"
        split_name(name)
        if source in {"random", "timm"} - set(also) or (source == "auto" and name not in shipped_names()):
            raise UsageError(f"no trained weights of {name}; write {name}=FILE, or choose from: {shipped_names()}")
        before = found[name].sources if name in found else ()
        if source in before:
            raise UsageError(f"--model {entry} is there twice; name another training's file, or leave it out")
        found[name] = Subject(name, (*before, source))
    if not found:
        raise UsageError("no checkpoint ships; pass --model MODEL=FILE")
    return found


def over_trainings_in_words(count: int) -> str:
    """What the brackets of a table over `count` trainings stand for, a sentence."""
    return f"Means over {count} trainings with Student's 95 % interval over them; differences are paired by seed."
