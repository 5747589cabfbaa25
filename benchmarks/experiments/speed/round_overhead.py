"""The cost of federation on one round: `options.RoundOptions`."""

from __future__ import annotations

import time
from statistics import median

import pandas as pd
import torch
from rich.console import Console

from experiments.rendering import csv
from experiments.speed.options import RoundOptions
from fedmjp.client import ClientTask
from fedmjp.config import RunConfig, from_flat
from fedmjp.federation import ENGINES, run_rounds
from fedmjp.objectives import client_loss
from fedmjp.records import provenance
from fedmjp.records.run_record import note_run


def federated_round(config: RunConfig, task: ClientTask) -> float:
    """Seconds from the first message of the second round to its end; the first round warms up."""
    marks: list[float] = []

    def conduct(grid) -> None:
        run_rounds(
            grid,
            task,
            "none",
            on_update=lambda view: None,
            on_round=lambda n, state: marks.append(time.perf_counter()),
        )

    ENGINES.get("local")(conduct, config.federation.clients, config.client_entropy())
    return marks[2] - marks[1]


def plain_round(config: RunConfig, task: ClientTask) -> float:
    """Seconds of the same gradients and the same step, without messages."""
    parameters = list(task.model.module.parameters())
    for number in (1, 2):
        start = time.perf_counter()
        mean = [torch.zeros_like(p) for p in parameters]
        for client in range(config.federation.clients):
            batch = task.batch(client, number, 0)
            loss = client_loss(task.model, batch.images, batch.labels, None, {})
            for total, gradient in zip(mean, torch.autograd.grad(loss, parameters), strict=True):
                total.add_(gradient, alpha=1 / config.federation.clients)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, mean, strict=True):
                parameter.sub_(gradient, alpha=config.federation.learning_rate)
    return time.perf_counter() - start


def measure(options: RoundOptions, console: Console) -> pd.DataFrame:
    """One row a model and batch size."""
    rows = []
    for model in options.models:
        for batch_size in options.batch_sizes:
            flat = {"model": model, "clients": options.clients, "batch_size": batch_size, "rounds": 2, "threads": 1}
            config = from_flat(flat)
            seconds: dict[str, list[float]] = {"federated": [], "plain": []}
            for _ in range(options.repeats):
                seconds["federated"].append(federated_round(config, ClientTask(config, "none")))
                seconds["plain"].append(plain_round(config, ClientTask(config, "none")))
            ratios = [f / p for f, p in zip(seconds["federated"], seconds["plain"], strict=True)]
            rows.append(
                {
                    "model": model,
                    "clients": options.clients,
                    "batch_size": batch_size,
                    "federated_seconds_median": median(seconds["federated"]),
                    "plain_seconds_median": median(seconds["plain"]),
                    "ratio_median": median(ratios),
                    "ratio_min": min(ratios),
                    "ratio_max": max(ratios),
                    "repeats": options.repeats,
                    "device": provenance.device_name(torch.device("cpu")),
                    "commit": provenance.commit(),
                }
            )
            console.print(
                f"{model} batch {batch_size}: {rows[-1]['ratio_median']:.3f}x the plain loop", highlight=False
            )
    return pd.DataFrame(rows)


def run(options: RoundOptions, console: Console) -> None:
    """Measure, write and print the table."""
    table = measure(options, console)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "overhead.csv").write_text(csv(table, 5))
    note_run(options.out, "python benchmarks/round_overhead.py", devices=table["device"], overwritten=True)
    console.print(table.drop(columns=["device", "commit"]).round(3).to_string(index=False), highlight=False)
    console.print(f"at most {table['ratio_median'].max():.3f}x (aim: 1.2x); table: {options.out}", highlight=False)
