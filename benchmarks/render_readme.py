"""Render the README's result tables from results/: python benchmarks/render_readme.py

Replaces what stands between `<!-- NAME -->` and `<!-- /NAME -->`; no figure there is typed by hand.
"""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent


def simulate_table() -> str:
    """Leakage of the committed run, as Markdown."""
    summary = pd.read_csv(ROOT / "results" / "simulate" / "summary.csv")
    lines = ["| defence | attack | PSNR (dB) | SSIM | LPIPS | patches > 25 dB |", "|---|---|---|---|---|---|"]
    for _, row in summary.iterrows():
        psnr = f"{row.psnr_mean:.1f} [{row.psnr_low:.1f}, {row.psnr_high:.1f}]"
        cells = [row.defense, f"`{row.attack}`", psnr, f"{row.ssim_mean:.2f}", f"{row.lpips_mean:.2f}"]
        lines.append("| " + " | ".join([*cells, f"{row.patch_recovery_mean:.0%}"]) + " |")
    return "\n".join(lines)


def overhead_table() -> str:
    """What MJP and Flower cost, as Markdown."""
    mjp = pd.read_csv(ROOT / "results" / "mjp_overhead" / "overhead.csv")
    rounds = pd.read_csv(ROOT / "results" / "round_overhead" / "overhead.csv")
    lines = ["| what | setting | ratio |", "|---|---|---|"]
    for _, row in mjp.iterrows():
        setting = f"{row.model}, batch {row.batch_size}, γ = {row.gamma}"
        spread = f"{row.step_ratio:.3f} (quartiles {row.step_ratio_q25:.2f} to {row.step_ratio_q75:.2f})"
        lines.append(f"| MJP step / plain step | {setting} | {spread} |")
        lines.append(f"| masks and jigsaw / plain step | {setting} | {row.input_share:.4f} |")
        lines.append(
            f"| masks and jigsaw: image by image in Python / ours | {setting} | {row.looped_over_vectorised:.1f} |"
        )
    for _, row in rounds.iterrows():
        setting = f"{row.model}, {row.clients} clients, batch {row.batch_size}, one thread"
        lines.append(f"| federated round / plain PyTorch loop | {setting} | {row.ratio:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Rewrite README.md in place."""
    path = ROOT / "README.md"
    text = path.read_text()
    for name, table in (("simulate", simulate_table()), ("overhead", overhead_table())):
        block = f"<!-- {name} -->\n{table}\n<!-- /{name} -->"
        text, count = re.subn(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, b=block: b, text, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"README.md needs one <!-- {name} --> ... <!-- /{name} --> block, found {count}")
    path.write_text(text)


if __name__ == "__main__":
    main()
