"""python -m fedmjp.train: train a model in one place, with the clients' model, data, loss and defence.

What computes is imported after the options are read and checked.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from datetime import datetime

from fedmjp.cli import guarded, parse, terminal
from fedmjp.training.config import TrainConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0, 2 for a mistake of usage, 130 for an interrupt."""
    config = parse(TrainConfig, "python -m fedmjp.train", TrainConfig.__doc__, arguments)
    if config.out == TrainConfig().out:
        config = dataclasses.replace(config, out=config.out / datetime.now().strftime("%Y%m%d-%H%M%S"))
    console = terminal()

    def work() -> None:
        config.validate()
        from fedmjp.training import train

        console.print(f"weights and model card: {train(config, console)}", soft_wrap=True, highlight=False)

    return guarded(work, lambda: f"finished epochs are in {config.out}; go on with --resume --out {config.out}")


if __name__ == "__main__":
    sys.exit(main())
