"""What is rendered from the measures of speed."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.rendering import Rendering, interval, markdown_table, read_run

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


RENDERINGS = (
    Rendering("speed", blocks={"speed": speed_block, "matching_speed": matching_speed_block}),
    Rendering("mjp_overhead", blocks={"overhead": overhead_block}),
)
