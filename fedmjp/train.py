"""python -m fedmjp.train: train a model in one place, with the clients' model, data, loss and defence.

What computes is imported after the options are read and checked.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from datetime import datetime

from attacks.registry import UsageError
from fedmjp.cli import EXIT_USAGE, guarded, parse, terminal
from fedmjp.defenses.options import require_used
from fedmjp.training.config import TrainConfig, default_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0, 2 for a mistake of usage, 130 for an interrupt."""
    try:
        default = default_config(_objective(sys.argv[1:] if arguments is None else arguments))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    config = parse(TrainConfig, "python -m fedmjp.train", TrainConfig.__doc__, arguments, default)
    if config.out == TrainConfig().out:
        config = dataclasses.replace(config, out=config.out / datetime.now().strftime("%Y%m%d-%H%M%S"))
    console = terminal()

    def work() -> None:
        """The training, from options to the path of its weights."""
        require_used(config.options, [config.defense])
        config.validate()
        from fedmjp.training import train

        console.print(f"weights and model card: {train(config, console)}", soft_wrap=True, highlight=False)

    return guarded(work, lambda: f"finished epochs are in {config.out}; go on with --resume --out {config.out}")


def _objective(arguments: Sequence[str]) -> str:
    """The value of --objective, which decides about the other options' defaults."""
    found = TrainConfig().objective
    for option, value in zip(arguments, [*arguments[1:], ""], strict=True):
        flag, equals, own = option.partition("=")
        if flag == "--objective" and (equals or value):
            found = own if equals else value
    return found


if __name__ == "__main__":
    sys.exit(main())
