"""The cost of federation on one round: `options.RoundOptions`."""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median

import pandas as pd
import torch
from rich.console import Console

from experiments.rendering import csv
from experiments.scaffold import Failure
from experiments.speed.options import RoundOptions
from fedmjp.client import ClientTask
from fedmjp.config import RunConfig, from_flat
from fedmjp.federation import ENGINES, run_rounds
from fedmjp.objectives import client_loss
from fedmjp.records import provenance
from fedmjp.records.files import write_whole
from fedmjp.records.run_record import note_run
from fedmjp.records.server_state import ServerState
from fedmjp.report.columns import TEXT

WEIGHT_TOLERANCE = 1e-5  # the two loops add the clients' gradients in other roundings


class PlainRounds:
    """The same gradients and the same steps without messages.

    Args:
        config: of the federation.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config, self.task = config, ClientTask(config, "none")
        self.parameters = list(self.task.model.module.parameters())

    def take(self, number: int) -> None:
        """Round `number`, from 1."""
        clients, task = self.config.federation.clients, self.task
        mean = [torch.zeros_like(p) for p in self.parameters]
        for client in range(clients):
            batch = task.batch(client, number, 0)
            loss = client_loss(task.model, batch.images, batch.labels, None, {})
            for total, gradient in zip(mean, torch.autograd.grad(loss, self.parameters), strict=True):
                total.add_(gradient, alpha=1 / clients)
        with torch.no_grad():
            for parameter, gradient in zip(self.parameters, mean, strict=True):
                parameter.sub_(gradient, alpha=self.config.federation.learning_rate)


def pairs_of_rounds(config: RunConfig) -> list[tuple[float, float]]:
    """Processor seconds of each federated round and of the plain round after it; the first pair warms up.

    The federation runs once. The plain loop takes its turn between two of its rounds.

    Raises:
        Failure: the loops do not come to the same weights.
    """
    plain, marks = PlainRounds(config), []

    def on_round(number: int, state: ServerState) -> None:
        """Between two rounds: the plain loop's turn."""
        end = time.process_time()
        for name, parameter in plain.task.parameters.items():
            if not torch.allclose(parameter, state.weights[name], rtol=0, atol=WEIGHT_TOLERANCE):
                raise Failure(f"after round {number} the plain loop has other weights {name} than the federation")
        start = time.process_time()
        plain.take(number + 1)
        marks.append((end, start, time.process_time()))

    def conduct(grid) -> None:
        run_rounds(grid, ClientTask(config, "none"), "none", on_update=lambda view: None, on_round=on_round)

    ENGINES.get("local")(conduct, config.federation.clients, config.client_entropy())
    pairs = [(end - before, after - start) for (_, _, before), (end, start, after) in pairwise(marks)]
    return pairs[1:]


def measure(options: RoundOptions, model: str, batch_size: int) -> dict[str, object]:
    """The row of a model and batch size."""
    flat = {"model": model, "clients": options.clients, "batch_size": batch_size, "threads": 1}
    pairs = pairs_of_rounds(from_flat(flat | {"rounds": options.repeats + 1}))
    federated, plain = map(list, zip(*pairs, strict=True))
    ratios = [f / p for f, p in pairs]
    return {
        "model": model,
        "clients": options.clients,
        "batch_size": batch_size,
        "federated_seconds_median": median(federated),
        "plain_seconds_median": median(plain),
        "ratio_median": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "repeats": options.repeats,
        "device": provenance.device_name(torch.device("cpu")),
        "commit": provenance.commit(),
    }


def run(options: RoundOptions, console: Console) -> None:
    """Measure, write after each row, and print the table."""
    file, key = options.out / "overhead.csv", ["model", "batch_size"]
    table = pd.read_csv(file, dtype=TEXT) if options.resume and file.exists() else pd.DataFrame()
    options.out.mkdir(parents=True, exist_ok=True)
    for model in options.models:
        for batch_size in options.batch_sizes:
            row = measure(options, model, batch_size)
            console.print(f"{model} batch {batch_size}: {row['ratio_median']:.3f}x the plain loop", highlight=False)
            table = pd.concat([table, pd.DataFrame([row])]).drop_duplicates(key, keep="last").sort_values(key)
            write_whole(file, csv(table, 5).encode())
    program, fresh = "python benchmarks/round_overhead.py", not options.resume
    note_run(options.out, program, devices=table["device"], commits=table["commit"], overwritten=fresh)
    console.print(table.drop(columns=["device", "commit"]).round(3).to_string(index=False), highlight=False)
    console.print(f"at most {table['ratio_median'].max():.3f}x (aim: 1.2x); table: {options.out}", highlight=False)
