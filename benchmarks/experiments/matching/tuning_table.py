"""The table of settings that were compared for gradient matching."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.rendering import MEAN, Rendering, csv, interval, markdown_table, read_rows
from fedmjp.metrics import bootstrap_mean


def tuning_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a combination of settings, in the order in which they were run.

    Returns:
        attack, settings (those that differ between the attack's lines, "rate 0.1, tv 0.2"), steps, count of images,
        psnr_mean with psnr_low and psnr_high (95 % bootstrap interval), label_accuracy_mean, seconds_median and
        highest (of the attack's lines).
    """
    lines = []
    for attack, own in rows.groupby("attack", sort=False):
        parameters = pd.DataFrame(list(own["attack_parameters"]), index=own.index)
        varied = [name for name in parameters if parameters[name].map(repr).nunique() > 1]
        labels = parameters.apply(lambda p, varied=varied: ", ".join(f"{n} {p[n]:g}" for n in varied), axis=1)
        for settings, group in own.groupby(labels, sort=False):
            psnr = bootstrap_mean(group["psnr"].to_numpy(float))
            lines.append(
                {
                    "attack": attack,
                    "settings": settings,
                    "steps": group["attack_parameters"].iloc[0]["steps"],
                    "count": int(group["psnr"].notna().sum()),
                    "psnr_mean": psnr.mean,
                    "psnr_low": psnr.low,
                    "psnr_high": psnr.high,
                    "label_accuracy_mean": float(group["details"].map(lambda d: d.get("label_accuracy")).mean()),
                    "seconds_median": group["seconds"].median(),
                }
            )
    table = pd.DataFrame(lines)
    return table.assign(highest=table["psnr_mean"] == table.groupby("attack")["psnr_mean"].transform("max"))


def tuning_files(folder: Path) -> dict[str, str]:
    """table.csv."""
    return {"table.csv": csv(tuning_table(read_rows(folder)), 4)}


def tuning_block(folder: Path) -> str:
    """A line a combination; the highest of an attack in bold."""
    table = pd.read_csv(folder / "table.csv", keep_default_na=False)
    lines = []
    for row in table.to_dict("records"):
        mean, bounds = interval(row, "psnr", 1, MEAN).split(" ", 1)
        mark = "**" if row["highest"] else ""
        lines.append([f"`{row['attack']}`", row["settings"], f"{mark}{mean}{mark} {bounds}"])
    return markdown_table(["attack", "settings", "PSNR (dB)"], lines)


TUNING = Rendering("matching_tuning", tuning_files, {"matching_tuning": tuning_block})
