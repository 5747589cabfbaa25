"""What many clients and images cost, from measured rates: a row's seconds, bytes or memory times a number of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from experiments.rendering import markdown_table, read_rows

CLIENTS, IMAGES = 10_000, 1_000_000
DAY = 24 * 3600.0  # seconds
DISK, MEMORY = 100 * 1024.0, 16 * 1024.0  # MiB, of the table of limits
ROWS_OF_IMAGE = 3  # an attack and the two guesses without a gradient


@dataclass(frozen=True)
class Timed:
    """Attacks whose seconds an image are read from committed rows.

    Attributes:
        folder: below results/.
        attack: its name.
        model: as the rows call it.
        steps: of a search; None for others.
    """

    folder: str
    attack: str
    model: str
    steps: int | None = None

    def seconds(self, results: Path) -> pd.Series:
        """Wall-clock seconds of each row; one thread, one image a batch.

        Args:
            results: the folder of all results.
        """
        rows = read_rows(results / self.folder)
        chosen = (rows["attack"] == self.attack) & (rows["model"] == self.model) & (rows["batch_size"] == 1)
        chosen &= rows["attack_parameters"].map(lambda own: own.get("steps")).isin([self.steps]) | (self.steps is None)
        return rows.loc[chosen & rows["device"].str.contains("1 threads"), "seconds"]


ATTACKS = (
    Timed("mjp_adaptive", "patch_embedding", "deit_s_mjp"),
    Timed("mjp_adaptive", "mjp_subspace", "deit_s_mjp"),
    Timed("mjp_adaptive_trained", "unmix", "vit_mini_64_mjp"),
    Timed("mjp_adaptive_vit_ti", "unmix", "vit_ti_mjp, 160 px"),
    Timed("gradient_matching/vit_mini_32_trained", "inverting_gradients", "vit_mini_32", 960),
)


def slope(table: pd.DataFrame, measured: str, size: str, value: str) -> float:
    """Growth of `value` from one client or row to the next, between the second largest size and the largest.

    Args:
        table: as `render.scale_table` gives it.
        size: clients or log_rows.
    """
    small, large = table[table["measured"] == measured].sort_values(size).tail(2).to_dict("records")
    return (large[value] - small[value]) / (large[size] - small[size])


def capacity_table(table: pd.DataFrame, results: Path) -> str:
    """Markdown: what a client or an image costs in time of a core, 10,000 of them, and a million."""
    overhead = pd.read_csv(results / "round_overhead" / "overhead.csv")
    models = table.groupby("measured")["model"].first()
    costs = [(f"round, `{models['round']}`, no attack", slope(table, "round", "clients", "cpu_seconds"), "scale")]
    for line in overhead[overhead["batch_size"] == 1].to_dict("records"):
        seconds = line["federated_seconds_median"] / line["clients"]
        costs.append((f"round, `{line['model']}`, no attack", seconds, "round_overhead"))
    audit = slope(table, "audit", "clients", "cpu_seconds")
    costs.append((f"audit, `{models['audit']}`: client, `patch_embedding`, scores, pictures", audit, "scale"))
    for timed in ATTACKS:
        own = timed.seconds(results)
        steps = f", {timed.steps} steps" if timed.steps else ""
        name = f"attack alone: `{timed.attack}`{steps}, `{timed.model}` (median of {len(own)})"
        costs.append((name, float(own.median()), timed.folder))
    report = ROWS_OF_IMAGE * slope(table, "report", "log_rows", "cpu_seconds")
    costs.append((f"report, {ROWS_OF_IMAGE} rows an image", report, "scale"))
    lines = [
        [name, duration(each), duration(CLIENTS * each), duration(IMAGES * each), f"`results/{folder}`"]
        for name, each, folder in costs
    ]
    heads = ["what, one image a client", "each", f"{CLIENTS:,}", "a million", "rates from"]
    return markdown_table(heads, lines)


def limits_table(table: pd.DataFrame, results: Path) -> str:
    """Markdown: how many images a day of one core, a disk and a memory have room for, and which of them ends first."""
    step = slope(table, "audit", "clients", "cpu_seconds")
    room = {
        "disk": DISK / slope(table, "audit", "clients", "disk_mib"),
        "memory of the audit": _in_memory(table, "audit", slope(table, "audit", "clients", "peak_mib")),
        "memory of the report": _in_memory(
            table, "report", ROWS_OF_IMAGE * slope(table, "report", "log_rows", "peak_mib")
        ),
    }
    lines = []
    for name, attack in (("`patch_embedding` alone", 0.0), *((_words(t), _median(t, results)) for t in ATTACKS[2:])):
        own = {"time": DAY / (step + attack), **room}
        lines.append([f"audit, {name}", *map(_count, own.values()), min(own, key=own.__getitem__)])
    memory = f"in {MEMORY / 1024:.0f} GiB of memory"
    heads = ["images", "in a day of one core", f"in {DISK / 1024:.0f} GiB of disk", f"{memory}, audit"]
    return markdown_table([*heads, f"{memory}, report", "ends first"], lines)


def _in_memory(table: pd.DataFrame, measured: str, each: float) -> float:
    """Images that `MEMORY` has room for beside what the process holds at its smallest size, at `each` MiB."""
    return (MEMORY - table.loc[table["measured"] == measured, "process_mib"].min()) / each


def duration(seconds: float) -> str:
    """Time in the largest unit of which it is at least one: "6.6 ms", "1.1 min", "42 days"."""
    for unit, size in (("days", DAY), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{1e3 * seconds:.3g} ms"


def _words(timed: Timed) -> str:
    return f"and `{timed.attack}`" + (f", {timed.steps} steps" if timed.steps else "") + f" (`{timed.model}`)"


def _median(timed: Timed, results: Path) -> float:
    return float(timed.seconds(results).median())


def _count(value: float) -> str:
    return f"{value:,.0f}" if value < 1e6 else f"{value / 1e6:.3g} million"
