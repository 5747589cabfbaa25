"""What is rendered from the measures of scale."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.rendering import Rendering, csv, markdown_table, read_rows
from experiments.scale.capacity import capacity_table, duration, limits_table, slope
from fedmjp.records.rows import PROVENANCE, Schema

SCHEMA = Schema(
    keys=(
        *PROVENANCE,
        *("measured", "clients", "log_rows", "seconds", "cpu_seconds", "before_mib", "process_mib"),
        *("disk_mib", "page_mib"),
    ),
    identity=("measured", "model", "dataset", "clients", "log_rows"),
)
MEASURED = ("round", "audit", "report")


def scale_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a size: measured, model, dataset, clients, log_rows, seconds, cpu_seconds, peak_mib, process_mib.

    `peak_mib` is what the work took above the process's memory before it.
    """
    sizes = ["clients", "log_rows"]
    numbers = rows.astype({name: float for name in ("process_mib", "before_mib", "disk_mib", "page_mib")})
    table = numbers.assign(peak_mib=numbers["process_mib"] - numbers["before_mib"])
    names = ["measured", "model", "dataset", *sizes, "seconds", "cpu_seconds", "peak_mib", "process_mib"]
    table = table.assign(place=table["measured"].map(MEASURED.index)).sort_values(["place", *sizes])
    return table[[*names, "disk_mib", "page_mib"]]


def scale_files(folder: Path) -> dict[str, str]:
    """table.csv."""
    return {"table.csv": csv(scale_table(read_rows(folder, SCHEMA)), 4)}


def scale_block(folder: Path) -> str:
    """One line a size: seconds, processor time a client or row, memory."""
    rows, lines = read_rows(folder, SCHEMA), []
    for line in scale_table(rows).to_dict("records"):
        count = line["clients"] or line["log_rows"]
        noun = f"clients of `{line['model']}`" if line["clients"] else "rows"
        memory = [f"{line['process_mib']:.0f} MiB", f"{line['peak_mib']:.0f} MiB"]
        page = "" if pd.isna(line["page_mib"]) else f"{line['page_mib']:.2f} MiB"
        name = f"{line['measured']}, {count:,} {noun}"
        seconds = [f"{line['seconds']:.1f}", f"{line['cpu_seconds']:.1f}", duration(line["cpu_seconds"] / count)]
        lines.append([name, *seconds, *memory, page])
    heads = ["what", "seconds", "of a core", "for each", "most memory", "of it, during the work", "page"]
    devices = "; ".join(dict.fromkeys(rows["device"]))
    data = "; ".join(dict.fromkeys(rows["dataset"][rows["clients"] > 0]))
    whose = f"one image of {data} a client, random weights"
    return f"{markdown_table(heads, lines)}\n\n{devices}; {whose}. Once each."


def capacity_block(folder: Path) -> str:
    """What 10,000 clients and a million images cost in time of a core."""
    return capacity_table(scale_table(read_rows(folder, SCHEMA)), folder.parent)


def limits_block(folder: Path) -> str:
    """How many images fit, and how disk and memory grow."""
    table = scale_table(read_rows(folder, SCHEMA))
    grown = {
        "disk of an audited image": 1024 * slope(table, "audit", "clients", "disk_mib"),
        "disk of a row": 1024 * slope(table, "report", "log_rows", "disk_mib"),
        "memory of a client in a round": 1024 * slope(table, "round", "clients", "peak_mib"),
        "memory of a client in an audit": 1024 * slope(table, "audit", "clients", "peak_mib"),
        "memory of a row in a report": 1024 * slope(table, "report", "log_rows", "peak_mib"),
    }
    growth = markdown_table(["what grows", "KiB each"], [[name, f"{value:.2f}"] for name, value in grown.items()])
    return f"{growth}\n\n{limits_table(table, folder.parent)}"


BLOCKS = {"scale": scale_block, "capacity": capacity_block, "limits": limits_block}
SCALE = Rendering("scale", scale_files, BLOCKS)
RENDERINGS = (SCALE,)
