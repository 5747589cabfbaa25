"""What every benchmark command has in common: shared options, and a command line that imports its protocol last.

The options of a command stand in a module that imports neither torch nor pandas; the protocol, which does, is imported
once the options are read and valid, so that `--help` and a mistyped option are answered at once.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import tyro

from attacks import ATTACKS
from attacks.registry import Registry, UsageError
from fedmjp.budgets import ALL, AUTO, attack_settings, read_seconds
from fedmjp.cli import EXIT_FAILURE, guarded, parse, split_commas, terminal
from fedmjp.config import ATTACKS_HELP, DefenseOptions
from fedmjp.defenses import DEFENSES
from fedmjp.defenses.chain import read_defense
from fedmjp.workers.options import WorkerConfig

BENCHMARKS = Path(__file__).resolve().parent.parent
RESULTS, PAPER = BENCHMARKS.parent / "results", BENCHMARKS / "paper"
DEFENSE_NAMES = f"choose from: {', '.join(DEFENSES)}"

T = TypeVar("T")


class Failure(Exception):
    """What ends a command with exit code 1; its text is for the user."""


@dataclass(frozen=True)
class DeviceOptions:
    """Where a command computes."""

    device: str = "cpu"
    """cpu, cuda, or cuda:INDEX."""
    threads: int = 0
    """Torch threads (0: torch's own choice, fewer while other programs keep cores busy)."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        if self.threads < 0:
            raise UsageError("--threads must not be negative")


@dataclass(frozen=True)
class RowOptions(DeviceOptions):
    """Where a command that writes rows computes and writes."""

    out: Path = Path("runs/benchmark")
    """Folder of rows, tables and figures."""
    resume: bool = False
    """Go on in a folder that holds rows already; rows that are there are not computed again."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        super().validate()
        if any(file.stat().st_size for file in self.out.glob("rows.jsonl*")) and not self.resume:
            raise UsageError(f"{self.out} holds rows already; pass --resume to go on with them, or another --out")

    def resume_hint(self) -> str:
        """How to go on after an interrupt."""
        return f"finished rows are in {self.out}; go on with --resume --out {self.out}"


@dataclass(frozen=True)
class WorkerOptions(RowOptions, WorkerConfig):
    """Commands whose batches of images may be attacked in several processes, or on a Ray cluster."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        self.check(self.device, self.threads)
        super().validate()

    def worker_config(self) -> WorkerConfig:
        """Where batches are computed."""
        return WorkerConfig(self.workers, self.ray)


@dataclass(frozen=True)
class AttackOptions(RowOptions):
    """What commands that score reconstructions have in common."""

    lpips_net: Literal["squeeze", "alex", "vgg"] = "squeeze"
    """Backbone of LPIPS."""
    lpips_weights: Path | None = None
    """State dict of lpips.LPIPS; without it and without a cached backbone the column stays empty."""


@dataclass(frozen=True)
class SuiteOptions(AttackOptions):
    """Commands whose attacks are chosen as those of an audit are (`fedmjp.audit.suite`)."""

    attacks: Annotated[tuple[str, ...], tyro.conf.arg(help=ATTACKS_HELP)] = (AUTO,)
    budget: str = "10s"
    """Time that --attacks auto may plan for each update, on one CPU core (60s, 2m): estimated, not measured, so that
    the same command runs the same attacks everywhere. What runs on no update is named in run.json with the reason."""
    steps: tuple[str, ...] = ()
    """Steps of the attacks that search, as a NUMBER for all or ATTACK=NUMBER (none given: each attack's own)."""
    attack_options: tuple[str, ...] = ()
    """Settings of attacks, as ATTACK.setting=value (mjp_subspace.prior.strength=20)."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        if not self.attacks:
            raise UsageError(f"--attacks takes auto, all, or names from: {', '.join(ATTACKS)}")
        check_names(ATTACKS, self.named())
        self.budget_seconds()
        self.attack_settings()
        super().validate()

    def budget_seconds(self) -> float:
        """--budget in seconds.

        Raises:
            UsageError: no such time.
        """
        return read_seconds(self.budget, "--budget")

    def every_attack(self) -> tuple[str, ...]:
        """All that is asked for with --attacks and options like it."""
        return self.attacks

    def named(self) -> tuple[str, ...]:
        """Of `every_attack`, the attacks that are asked for by name."""
        return tuple(name for name in self.every_attack() if name not in (AUTO, ALL))

    def attack_settings(self) -> dict[str, dict[str, Any]]:
        """The settings given for attacks, by attack.

        Raises:
            UsageError: no such attack, or one that does not run.
        """
        return attack_settings(self.every_attack(), self.steps, self.attack_options)


@dataclass(frozen=True)
class DefendedOptions(AttackOptions):
    """Attacks on clients under one defence."""

    defense: Annotated[str, tyro.conf.arg(help=f"The clients' defence; {DEFENSE_NAMES}.")] = "mjp"
    options: DefenseOptions = field(default_factory=DefenseOptions)  # type: ignore[valid-type]

    adapts: ClassVar[bool] = False  # whether the command builds the layers that a defence adds

    def chosen_defense(self, **changes: Any):
        """The defence with its options of the command line, some of them changed.

        Raises:
            UsageError: no such defence, options out of range, or a defence with a model of its own.
        """
        chosen = read_defense(self.defense, lambda name: getattr(self.options, name, None))
        defense = dataclasses.replace(chosen, **changes)
        defense.validate()
        if defense.adapts and not self.adapts:
            raise UsageError(
                f"--defense {self.defense} changes the model's layers, which this command does not; run it with "
                "python -m fedmjp.simulate"
            )
        return defense

    def has(self, option: str) -> bool:
        """Whether the defence has an option of this name."""
        return option in {f.name for f in dataclasses.fields(self.chosen_defense())}

    def sweep(self, gammas: Sequence[float]) -> list:
        """The defence at each of `gammas`; a defence without the option `gamma` once, as its options say.

        Raises:
            UsageError: `--gamma` is given where a list of gammas is swept, or options out of range.
        """
        defense = self.chosen_defense()
        if not self.has("gamma"):
            return [defense]
        found = sweep(defense, "gamma", gammas)
        for one in found:
            one.validate()
        return found


def sweep(defense: Any, option: str, values: Sequence[float]) -> list:
    """A defence at each value of one of its options.

    Raises:
        UsageError: the option itself was set, too.
    """
    if getattr(defense, option) != getattr(type(defense)(), option):
        flag = f"--{option.replace('_', '-')}"
        raise UsageError(f"this command takes {flag}s, a run for each value, and no {flag}")
    return [dataclasses.replace(defense, **{option: value}) for value in values]


def check_names(registry: Registry, names: Sequence[str]) -> None:
    """Raise `UsageError` for a name that is not registered, before any entry is imported."""
    for name in names:
        if name not in registry:
            registry.get(name)


def check_positive(options: Any, *names: str) -> None:
    """Raise `UsageError` for an option below 1; None means no limit, and of a tuple every entry counts."""
    for name in names:
        given = getattr(options, name)
        for value in given if isinstance(given, tuple) else (given,):
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {value}")


def command(name: str, options: type[T], protocol: str) -> Callable[[Sequence[str] | None], int]:
    """The command line of benchmarks/`name`.py.

    Args:
        options: a dataclass; its docstring is the help. Its `validate`, where it has one, is called before the protocol
            is imported, and its `resume_hint` describes how to go on after an interrupt.
        protocol: a module with `run(options, console)`, imported once the options are valid.

    Returns:
        a function from arguments (None: those of the process) to the exit code: 0, 1 for a `Failure`, 2 for a mistake
        of usage, 130 for an interrupt.
    """

    def main(arguments: Sequence[str] | None = None) -> int:
        """Run the command line; returns the exit code."""
        program = f"python benchmarks/{name}.py"
        given = split_commas(parse(options, program, inspect.getdoc(options), arguments))
        hint = getattr(given, "resume_hint", lambda: "nothing was written; run it again")

        def work() -> None:
            if hasattr(given, "validate"):
                given.validate()
            import_module(protocol).run(given, terminal())

        try:
            return guarded(work, hint)
        except Failure as failure:
            print(f"error: {failure}", file=sys.stderr)
            return EXIT_FAILURE

    return main
