"""What is rendered from the measures of speed."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.rendering import Rendering, csv, interval, markdown_table, read_run

RANGE = ("_median", "_min", "_max")
WAYS = {
    "peer": "`breaching`",
    "same": "ours, same arithmetic",
    "alone": "ours, one case at a time",
    "together": "ours, eight cases at once, each",
}


def speed_block(folder: Path) -> str:
    """Cost of the leakage benchmark."""
    lines, measured = [], read_run(folder)["leakage"]
    for _, row in pd.read_csv(folder / "speed.csv").iterrows():
        where, ours = f"{row.block}, `{row.attack}`, {row.model}", interval(row, "ours_over_bare", 2, RANGE)
        lines.append(["our path / bare batched forward and backward pass", where, ours])
        if not pd.isna(row.get("peer_over_ours_median")):
            peer = interval(row, "peer_over_ours", 2, RANGE)
            lines.append(["`breaching`, own gradient an image, same scores / our path", where, peer])
        memory = f"{row.ours_peak_mib:.0f} MiB, bare pass {row.bare_peak_mib:.0f} MiB"
        lines.append(["peak memory above model and images", where, memory])
    lpips = "LPIPS included" if measured["lpips"] else "without LPIPS"
    table = markdown_table(["what", "block, attack", "ratio [min, max]"], lines)
    return f"{table}\n\n{measured['device']}, batches of {measured['batch_size']}, {lpips}."


def matching_speed_block(folder: Path) -> str:
    """Steps of gradient matching against those of the `breaching` package."""
    lines, measured = [], read_run(folder)["matching"]
    for _, row in pd.read_csv(folder / "matching.csv").iterrows():
        cells = [
            f"{row.model}, {row.batch_size}",
            WAYS[row.way],
            f"{row.step_ms_mean:.0f}",
            interval(row, "times_faster", 2),
        ]
        lines.append([*cells, f"{row.peak_mib:.0f}"])
    table = markdown_table(["model, batch", "what", "ms a step", "times faster", "peak memory (MiB)"], lines)
    machine = (
        f"{measured['device']}, {measured['rounds']} rounds that take all four in turn; ratios of mean times, 95 %"
    )
    return f"{table}\n\n{machine}\nbootstrap intervals over rounds."


def overhead_block(folder: Path) -> str:
    """What MJP costs a step, and Flower a round."""
    lines = []
    for _, row in pd.read_csv(folder / "overhead.csv").iterrows():
        setting = f"{row.model}, batch {row.batch_size}, γ = {row.gamma}"
        spread = f"{row.step_ratio_median:.3f} (quartiles {row.step_ratio_q25:.2f} to {row.step_ratio_q75:.2f})"
        lines.append(["MJP step / plain step", setting, spread])
        lines.append(["masks and jigsaw / plain step", setting, f"{row.input_share:.4f}"])
        loops = f"{row.looped_over_vectorised:.1f}"
        lines.append(["masks and jigsaw: image by image in Python / ours", setting, loops])
    for _, row in pd.read_csv(folder.parent / "round_overhead" / "overhead.csv").iterrows():
        setting = f"{row.model}, {row.clients} clients, batch {row.batch_size}, one thread"
        lines.append(["federated round / plain PyTorch loop", setting, f"{row.ratio_median:.2f}"])
    return markdown_table(["what", "setting", "ratio"], lines)


def campaign_table(folder: Path) -> pd.DataFrame:
    """Seconds and speed-up of each executor, paired within each turn (`campaign_speed`)."""
    runs = pd.read_csv(folder / "runs.csv")
    serial = runs[runs["executor"] == SERIAL].set_index("repeat")
    lines = []
    for keys, own in runs.groupby(["model", "gamma", "batch_size", "executor", "count"], sort=False):
        line = dict(zip(("model", "gamma", "batch_size", "executor", "count"), keys, strict=True))
        quantities = {
            "seconds": own["seconds"],
            "speedup": own["repeat"].map(serial["seconds"]) / own["seconds"],
            "core_seconds": own["core_seconds"],
            "core_speedup": own["repeat"].map(serial["core_seconds"]) / own["core_seconds"],
            "load": own["load"],
        }
        for name, values in quantities.items():
            line |= {f"{name}_{part}": getattr(values, part)() for part in ("median", "min", "max")}
        lines.append(line | {"repeats": len(own)})
    return pd.DataFrame(lines)


def campaign_block(folder: Path) -> str:
    """How long a campaign takes in one process, in several, and on Ray."""
    lines, run = [], read_run(folder)
    for _, row in pd.read_csv(folder / "table.csv").iterrows():
        times = [interval(row, name, 2 if "speedup" in name else 0, RANGE) for name in TIMES]
        where = row.executor if row.executor == SERIAL else f"`{row.executor}`"
        lines.append([where, *("" if "nan" in cell else cell for cell in times)])
        about = f"{row['count']} images of `{run['images']}`, {row.model}, γ = {row.gamma}, {row.batch_size} a task"
    table = markdown_table(["where", *TIMES.values()], lines)
    return f"{table}\n\n{about}; {run['cores']} CPU cores, {row.repeats} turns; medians."


SERIAL = "one process"
TIMES = {
    "seconds": "seconds [min, max]",
    "speedup": "times faster",
    "load": "load average before",
    "core_seconds": "CPU seconds of a core",
    "core_speedup": "times fewer",
}
CAMPAIGN = Rendering(
    "campaign_speed",
    files=lambda folder: {"table.csv": csv(campaign_table(folder), 5)},
    blocks={"campaign_speed": campaign_block},
)
RENDERINGS = (
    CAMPAIGN,
    Rendering("speed", blocks={"speed": speed_block, "matching_speed": matching_speed_block}),
    Rendering("mjp_overhead", blocks={"overhead": overhead_block}),
)
