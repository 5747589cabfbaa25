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


def training_table(folder: Path) -> pd.DataFrame:
    """Our training step beside a bare timm loop's, paired; medians and quartiles (`training_speed`)."""
    runs = pd.read_csv(folder / "runs.csv")
    loaded = {name: runs["load_seconds"] + runs[f"{name}_seconds"] for name in ("ours", "bare", "fused")}
    runs["step_over_bare"] = runs["ours_seconds"] / runs["bare_seconds"]
    runs["step_over_fused"] = runs["ours_seconds"] / runs["fused_seconds"]
    runs["loaded_step_over_bare"] = loaded["ours"] / loaded["bare"]
    runs["loaded_step_over_fused"] = loaded["ours"] / loaded["fused"]
    runs["images_per_second"] = runs["batch_size"] / runs["ours_seconds"]
    runs["bare_images_per_second"] = runs["batch_size"] / runs["bare_seconds"]
    runs["loaded_images_per_second"] = runs["batch_size"] / loaded["ours"]
    lines, keys = [], ["model", "image_size", "batch_size", "precision"]
    for values, own in runs.groupby(keys, sort=False):
        line = dict(zip(keys, values, strict=True))
        line |= {f"{n}_median": own[n].median() for n in runs.columns if n.endswith("images_per_second")}
        for name in (n for n in runs.columns if "step_over" in n):
            line |= {f"{name}_{part}": own[name].quantile(q) for part, q in QUARTILES.items()}
        lines.append(line | {"repeats": len(own), "device": own["device"].iloc[0]})
    return pd.DataFrame(lines)


def training_block(folder: Path) -> str:
    """Training beside a bare timm loop."""
    lines = []
    table = training_table(folder)
    for _, row in table.iterrows():
        setting = f"{row.model}, {row.image_size} px, batch {row.batch_size}, {row.precision}"
        speeds = (f"{row[f'{way}images_per_second_median']:.1f}" for way in ("", "bare_", "loaded_"))
        ratios = (
            f"{row[f'{name}_median']:.3f} ({row[f'{name}_q25']:.2f} to {row[f'{name}_q75']:.2f})"
            for name in ("step_over_bare", "loaded_step_over_bare", "step_over_fused")
        )
        lines.append([setting, *speeds, *ratios])
    head = [
        "training",
        "images/s",
        "bare loop",
        "with loading",
        "step / bare step",
        "with loading",
        "/ fused attention",
    ]
    pairs = f"{table['repeats'].min()} pairs of steps, medians (quartiles)"
    return f"{markdown_table(head, lines)}\n\n{', '.join(sorted(set(table['device'])))}; {pairs}."


QUARTILES = {"median": 0.5, "q25": 0.25, "q75": 0.75}
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


def _training(name: str) -> Rendering:
    files = {"files": lambda folder: {"table.csv": csv(training_table(folder), 5)}}
    return Rendering(name, **files, blocks={name: training_block})


TRAINING = _training("training_speed")
RENDERINGS = (
    CAMPAIGN,
    TRAINING,
    Rendering("speed", blocks={"speed": speed_block, "matching_speed": matching_speed_block}),
    _training("training_speed_gpu"),
    Rendering("speed_gpu", blocks={"speed_gpu": speed_block}),
    Rendering("mjp_overhead", blocks={"overhead": overhead_block}),
)
