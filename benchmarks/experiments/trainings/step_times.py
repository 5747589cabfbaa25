"""Seconds of a training step of each variant of a table.

The timed steps alternate in one process, so that a busy machine affects all alike; a ratio is the median over rounds of
a step's seconds by those of the first variant's step in the same round.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.progress import track

from attacks import UsageError
from experiments.speed.timing import timed
from experiments.trainings.options import TimedOptions, Variant
from experiments.trainings.tables import TrainingTable
from fedmjp.objectives import Draws
from fedmjp.records import provenance
from fedmjp.training.trainer import Trainer, load


def time_steps(table: TrainingTable, options: TimedOptions, variants: Sequence[Variant]) -> None:
    """Write `latency.csv` to `options.out`, unless no rounds are asked for.

    Args:
        table: whose options are checked before any work.
        variants: those to time, the reference first.

    Raises:
        UsageError: see `TrainingOptions.check`; a negative number of rounds.
    """
    if options.timing_rounds < 0:
        raise UsageError("--timing-rounds must not be negative")
    options.check(table.variants)
    if options.timing_rounds:
        options.out.mkdir(parents=True, exist_ok=True)
        latency(options, variants).to_csv(options.out / "latency.csv", index=False, float_format="%.5g")


def latency(options: TimedOptions, variants: Sequence[Variant]) -> pd.DataFrame:
    """Seconds of a training step of each variant, and its ratio to the first one's: median, quartiles over rounds."""
    configs = {variant.name: options.config(variant, options.seeds[0]) for variant in variants}
    first = variants[0].name
    data = load(configs[first])
    trainers = {name: Trainer(config, data) for name, config in configs.items()}
    images, labels = next(trainers[first].batches.epoch(1, trainers[first].device))
    draws = Draws.seeded(options.seeds[0], options.seeds[0])
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in track(range(options.timing_rounds + 2), description="timed steps", transient=True):
        for name, trainer in trainers.items():
            trainer.model.module.train()
            seconds[name].append(timed(lambda t=trainer: t.step(images, labels, draws, 1), trainer.device))
    found = []
    for name, trainer in trainers.items():
        own = pd.Series(seconds[name][2:])  # the first rounds warm up
        ratios = own / pd.Series(seconds[first][2:])
        found.append(
            {
                "line": name,
                "model": trainer.model.name,
                "batch_size": len(images),
                "seconds_median": own.median(),
                "ratio_median": ratios.median(),
                "ratio_q25": ratios.quantile(0.25),
                "ratio_q75": ratios.quantile(0.75),
                "repeats": options.timing_rounds,
                "precision": trainer.config.activations(),
                **provenance.columns(trainer.device),
            }
        )
    return pd.DataFrame(found)


def timed_steps(folder: Path) -> dict[str, dict[str, str]]:
    """The column of step times for a table, from `latency.csv`; none where there is no such file."""
    path = folder / "latency.csv"
    if not path.exists():
        return {}
    rows = pd.read_csv(path, dtype={"line": str}).set_index("line")
    cells = {name: f"{r.ratio_median:.2f} ({r.ratio_q25:.2f} to {r.ratio_q75:.2f})" for name, r in rows.iterrows()}
    return {f"step / {rows.index[0]}'s (quartiles)": cells}
