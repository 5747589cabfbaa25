"""Render the README's result tables from results/: python benchmarks/render_readme.py

Replaces what stands between `<!-- NAME -->` and `<!-- /NAME -->`; no figure there is typed by hand.
"""

from __future__ import annotations

import json
import re
from functools import partial
from math import nan
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


def leakage_table() -> str:
    """PSNR of Table 5 on both blocks, a line a model and a column a setting, the paper's figures in parentheses."""
    table = pd.read_csv(ROOT / "results" / "april_attack" / "table.csv", keep_default_na=True)
    table["block"] = table["block"].fillna("any")
    lines = ["| block | attack | model | (a) | (b) | (c) | (d) | accuracy (a), (b) |", "|" + "---|" * 8]
    for (block, attack, line), group in table.groupby(["block", "attack", "line"], sort=False):
        own = group.set_index("setting")
        cells = [_psnr(own.loc[s]) if s in own.index else "" for s in "abcd"]
        accuracy = ", ".join(f"{own['accuracy'].get(s):.1f} %" for s in "ab" if own["accuracy"].get(s, nan) > 0)
        lines.append("| " + " | ".join([block, f"`{attack}`", line, *cells, accuracy]) + " |")
    return "\n".join(lines)


def _psnr(row: pd.Series) -> str:
    if pd.isna(row.psnr_mean):
        return "no image"
    interval = f"{row.psnr_mean:.1f} [{row.psnr_low:.1f}, {row.psnr_high:.1f}]"
    return interval + ("" if pd.isna(row.paper_psnr) else f" ({row.paper_psnr:.1f})")


def position_claim() -> str:
    """With and without position embeddings, as position_claim.py wrote it."""
    return (ROOT / "results" / "april_attack" / "position_claim.md").read_text().strip()


def adaptive_table(name: str) -> str:
    """MJP under attacks that know it, from results/`name`: against gamma, and against the number of updates."""
    folder = ROOT / "results" / name
    one, updates = pd.read_csv(folder / "one_update.csv"), pd.read_csv(folder / "updates.csv")
    lines = ["| one update, γ | attack | whole image (dB) | visible patches (dB) | images |", "|---|---|---|---|---|"]
    for _, row in one.sort_values(["gamma", "attack"], ascending=[True, False]).iterrows():
        mean = f"{row['mean']:.1f} [{row.low:.1f}, {row.high:.1f}], median {row['median']:.1f}"
        lines.append(f"| {row.gamma} | `{row.attack}` | {mean} | median {row.median_visible:.1f} | {row.images:.0f} |")
    lines += [
        "",
        "| γ, schedule | attack | after so many updates | median (dB) | first decile (dB) | images above 25 dB |",
        "|---|---|---|---|---|---|",
    ]
    for (gamma, schedule, attack), own in updates.groupby(["gamma", "setting", "attack"], sort=False):
        columns = {"round": ".0f", "median": ".1f", "first_decile": ".1f", "share_good": ".0%"}
        cells = [", ".join(format(value, form) for value in own[name]) for name, form in columns.items()]
        cells[-1] += f" of {own['images'].max():.0f}"
        lines.append("| " + " | ".join([f"{gamma}, {schedule}", f"`{attack}`", *cells]) + " |")
    return "\n".join(lines)


def batches_table() -> str:
    """Small batches separated, as batch_rounds.py wrote it."""
    table = pd.read_csv(ROOT / "results" / "batch_rounds" / "table.csv")
    lines = ["| batches of | attack | PSNR (dB) | median | first decile | images |", "|---|---|---|---|---|---|"]
    for _, row in table.iterrows():
        mean = f"{row['mean']:.1f} [{row.low:.1f}, {row.high:.1f}]"
        cells = [f"{row.batch_size}, {row.model}", f"`{row.attack}`", mean, f"{row['median']:.1f}"]
        lines.append("| " + " | ".join([*cells, f"{row.first_decile:.1f}", str(row.images)]) + " |")
    return "\n".join(lines)


def speed_table() -> str:
    """Cost of the leakage benchmark, as Markdown."""
    table = pd.read_csv(ROOT / "results" / "speed" / "speed.csv")
    machine = json.loads((ROOT / "results" / "speed" / "machine.json").read_text())
    lines = ["| what | block, attack | ratio [min, max] |", "|---|---|---|"]
    for _, row in table.iterrows():
        where = f"{row.block}, `{row.attack}`, {row.model}"
        ours = f"{row.ours_over_bare:.2f} [{row.ours_over_bare_min:.2f}, {row.ours_over_bare_max:.2f}]"
        lines.append(f"| our path / bare batched forward and backward pass | {where} | {ours} |")
        if row.get("peer_over_ours") == row.get("peer_over_ours"):
            peer = f"{row.peer_over_ours:.2f} [{row.peer_over_ours_min:.2f}, {row.peer_over_ours_max:.2f}]"
            lines.append(f"| `breaching`, own gradient an image, same scores / our path | {where} | {peer} |")
        memory = f"{row.ours_peak_mib:.0f} MiB, bare pass {row.bare_peak_mib:.0f} MiB"
        lines.append(f"| peak memory above model and images | {where} | {memory} |")
    told = "LPIPS included" if machine["lpips"] else "without LPIPS"
    return "\n".join(lines) + f"\n\n{machine['device']}, batches of {machine['batch_size']}, {told}."


def matching_table(folder: str) -> str:
    """Gradient matching against the original images, a line an attack and start, a column a kind of client; MJP for
    batches of one."""
    table = pd.read_csv(ROOT / "results" / "gradient_matching" / folder / "table.csv", keep_default_na=False)
    table = table[(table["setting"] == "original") & ((table["defense"] == "none") | (table["batch"] == 1))]
    table = table.sort_values("steps", kind="stable")
    number = pd.to_numeric(table["psnr"])
    kinds = list(dict.fromkeys(zip(table["defense"], table["gamma"], table["batch"], strict=True)))
    heads = [f"MJP γ = {gamma}" if defense == "mjp" else f"batch of {batch}" for defense, gamma, batch in kinds]
    lines = ["| attack | steps | " + " | ".join(heads) + " |", "|" + "---|" * (2 + len(heads))]
    for (attack, init, steps), group in table.groupby(["attack", "init", "steps"], sort=False):
        cells = []
        for kind in kinds:
            own = group[[key == kind for key in zip(group["defense"], group["gamma"], group["batch"], strict=True)]]
            mark = "**" if len(own) and own.iloc[0]["verdict"] == "beats the mean image" else ""
            spread = [float(own.iloc[0][k]) for k in ("psnr_low", "psnr_high")] if len(own) else []
            cells.append(
                f"{mark}{number[own.index[0]]:.1f}{mark} [{spread[0]:.1f}, {spread[1]:.1f}]" if len(own) else ""
            )
        name = f"`{attack}`" + (f" from `{init}`" if init not in ("", "randn") else "")
        lines.append("| " + " | ".join([name, str(steps or "–"), *cells]) + " |")
    return "\n".join(lines)


def matching_speed_table() -> str:
    """Steps of gradient matching against breaching's, as Markdown."""
    folder = ROOT / "results" / "speed"
    table = pd.read_csv(folder / "matching.csv")
    machine = json.loads((folder / "matching_machine.json").read_text())
    words = {
        "peer": "`breaching`",
        "same": "ours, same arithmetic",
        "alone": "ours, one case at a time",
        "together": "ours, eight cases at once, each",
    }
    lines = [
        "| model, batch | what | ms a step | times faster | peak memory (MiB) |",
        "|---|---|---|---|---|",
    ]
    for _, row in table.iterrows():
        ratio = f"{row.times_faster:.2f} [{row.times_faster_low:.2f}, {row.times_faster_high:.2f}]"
        cells = [f"{row.model}, {row.batch}", words[row.what], f"{row.ms_a_step:.0f}", ratio, f"{row.peak_mib:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        f"{machine['device']}, {machine['rounds']} rounds that take all four in turn; ratios of mean times, 95 %",
    ]
    return "\n".join([*lines, "bootstrap intervals over rounds."])


def training_table() -> str:
    """The checkpoints that ship, a line each."""
    table = pd.read_csv(ROOT / "results" / "training" / "table.csv")
    lines = ["| checkpoint | data | γ in training | epochs | images seen | top-1 |", "|" + "---|" * 6]
    for _, row in table.iterrows():
        gamma = "" if pd.isna(row.gamma) else f"{row.gamma:g}"
        cells = [f"`{row.model}`", row.data, gamma, f"{row.epochs}", f"{row.images_seen:,}", f"{row.accuracy:.1f} %"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def consistency_table(folder: str, paper: bool) -> str:
    """Accuracy against the masking ratio, Diff. Norm. and Consistency at 0.5, ours before the paper's."""
    table = pd.read_csv(ROOT / "results" / folder / "table.csv")
    table = table if paper else table[table["source"] == "measured"]
    ratios = (0.0, 0.5, 0.9)
    heads = [*(f"γ = {g:g}" for g in ratios), "Diff. Norm.", "of another image's", "Consistency (%)"]
    lines = ["| model | positions | " + " | ".join(heads) + " |", "|" + "---|" * (2 + len(heads))]
    ours = table[table["source"] == "measured"]
    for (model, way), group in ours.groupby(["model", "positions"], sort=False):
        own = group.set_index("gamma")
        cells = [_interval(own.loc[g], "accuracy", 1) for g in ratios]
        cells += [_interval(own.loc[0.5], name, digits) for name, digits in (("diff_norm", 2), ("diff_share", 4))]
        lines.append("| " + " | ".join([f"`{model}`", way, *cells, _interval(own.loc[0.5], "consistency", 1)]) + " |")
    for _, row in table[table["source"] == "paper, Table 1"].iterrows():
        name = f"{row.model.removesuffix('_mjp')}{' + MJP' if row.defense == 'mjp' else ''}, paper's Table 1"
        cells = [f"{row.accuracy:g}", *[""] * (len(ratios) - 1), f"{row.diff_norm:g}", "", f"{row.consistency:g}"]
        lines.append("| " + " | ".join([name, "", *cells]) + " |")
    return "\n".join(lines)


def _interval(row: pd.Series, name: str, digits: int) -> str:
    value, low, high = (f"{row[f'{name}{part}']:z.{digits}f}" for part in ("", "_low", "_high"))
    return f"{value} [{low}, {high}]"


def position_table() -> str:
    """Explained variance and position regression, ours before the paper's."""
    folder = ROOT / "results" / "position_embeddings"
    variance, errors = pd.read_csv(folder / "explained_variance.csv"), pd.read_csv(folder / "regression.csv")
    shown = (3, 4, 6, 7)
    heads = [*(f"first {n}" for n in shown), "1-D error (guessing)", "2-D error (guessing)", "1-D, ridge", "2-D, ridge"]
    lines = ["| position embeddings | " + " | ".join(heads) + " |", "|" + "---|" * (1 + len(heads))]
    for (model, weights), group in variance[variance["source"] == "measured"].groupby(["model", "weights"], sort=False):
        own = group.set_index("dimension")["explained_variance"]
        row = errors[(errors["model"] == model) & (errors["weights"] == weights)].iloc[0]
        told = [f"{row[f'mae_{k}']:.2f} ± {row[f'mae_{k}_spread']:.2f} ({row[f'guess_{k}']:.1f})" for k in ("1d", "2d")]
        told += [f"{row[f'ridge_{k}']:.2f} ± {row[f'ridge_{k}_spread']:.2f}" for k in ("1d", "2d")]
        name = f"`{model}`, {'random' if 'NOT TRAINED' in weights else 'trained'}"
        lines.append("| " + " | ".join([name, *(f"{own[n]:.1f} %" for n in shown), *told]) + " |")
    for model, group in variance[variance["source"] != "measured"].groupby("model", sort=False):
        own = group.set_index("dimension")["explained_variance"]
        lines.append(
            "| " + " | ".join([f"{model}, paper's Table 7", *(f"{own[n]:.1f} %" for n in shown), "", "", "", ""]) + " |"
        )
    for _, row in errors[errors["source"] != "measured"].iterrows():
        told = [f"{row[f'mae_{k}']:.3f} ± {row[f'mae_{k}_spread']:.3f}" for k in ("1d", "2d")]
        name = row.model if row.dal == "none" or pd.isna(row.dal) else f"{row.model} ({row.dal} DAL)"
        lines.append("| " + " | ".join([f"{name}, paper's Table 8", *[""] * len(shown), *told, "", ""]) + " |")
    return "\n".join(lines)


def corruption_table() -> str:
    """Errors by corruption, a line each, a column a model, with the paired difference from the plain one."""
    folder = ROOT / "results" / "corruptions"
    table, means = (pd.read_csv(folder / name, keep_default_na=False) for name in ("table.csv", "summary.csv"))
    ours, paper = (table[(table["source"] == "measured") == own] for own in (True, False))
    models, theirs = list(dict.fromkeys(ours["model"])), list(dict.fromkeys(paper["model"]))
    plain, *others = models
    heads = [f"`{plain}`", *(f"`{m}` (difference)" for m in others), *(f"CE of `{m}`" for m in others)]
    heads += [f"{model}, paper" for model in theirs]
    lines = ["| error (%) | " + " | ".join(heads) + " |", "|" + "---|" * (1 + len(heads))]
    own, whole = ours.set_index(["corruption", "model"]), means.set_index(["corruptions", "model"])
    printed = paper.set_index(["corruption", "model"])["error"]
    rows = [("untouched", whole.loc["none"], "mce", ["", ""])]
    for name in dict.fromkeys(ours["corruption"]):
        rows.append((name.replace("_", " "), own.loc[name], "ce", [printed.get((name, m), "") for m in theirs]))
    ten = whole.loc["table 9"]
    told = [f"{float(ten.loc[m, 'error']):.1f}, printed {float(ten.loc[m, 'printed_mce']):.1f}" for m in theirs]
    rows += [("mean of the paper's ten", ten, "mce", told), ("mean of all", whole.loc["all"], "mce", ["", ""])]
    for name, found, ce, beside in rows:
        found = found.loc[models].apply(pd.to_numeric, errors="coerce")
        cells = [_interval(found.loc[plain], "error", 1)]
        cells += [f"{found.loc[m, 'error']:.1f} ({_interval(found.loc[m], 'difference', 1)})" for m in others]
        cells += [_interval(found.loc[m], ce, 1) for m in others]
        lines.append("| " + " | ".join([name, *cells, *map(str, beside)]) + " |")
    return "\n".join(lines)


def attention_table() -> str:
    """Measures of the last block's attention, a line a model, differences from the plain one below its variants."""
    table = pd.read_csv(ROOT / "results" / "attention_maps" / "table.csv")
    digits = {"entropy": 3, "distance": 3, "head_diversity": 3, "content": 2}
    heads = ["entropy / uniform", "distance / image side", "head diversity", "content (bits)"]
    lines = ["| model | patches | " + " | ".join(heads) + " |", "|" + "---|" * (2 + len(heads))]
    for place, row in table.iterrows():
        random = "NOT TRAINED" in row.weights
        cells = [_interval(row, name, count) for name, count in digits.items()]
        lines.append(
            "| " + " | ".join([f"`{row.model}`, {'random' if random else 'trained'}", str(row.patches), *cells]) + " |"
        )
        if place and not random and not pd.isna(row.entropy_difference):
            cells = [_interval(row, f"{name}_difference", count) for name, count in digits.items()]
            lines.append("| " + " | ".join([f"… minus `{table.model[0]}`", "", *cells]) + " |")
    return "\n".join(lines)


def written_table(folder: str, paragraphs: int | None = None) -> str:
    """The first `paragraphs` (all by default) of the Markdown that a benchmark wrote itself."""
    text = (ROOT / "results" / folder / "table.md").read_text(encoding="utf-8")
    return "\n\n".join(text.split("\n\n")[:paragraphs]).strip()


def main() -> None:
    """Rewrite README.md in place."""
    path = ROOT / "README.md"
    text = path.read_text()
    blocks = {
        "simulate": simulate_table,
        "april_attack": leakage_table,
        "position_claim": position_claim,
        "adaptive": partial(adaptive_table, "mjp_adaptive"),
        "adaptive_trained": partial(adaptive_table, "mjp_adaptive_trained"),
        "batches": batches_table,
        "speed": speed_table,
        "matching": partial(matching_table, "vit_mini_32"),
        "matching_trained": partial(matching_table, "vit_mini_32_trained"),
        "matching_speed": matching_speed_table,
        "tradeoff": partial(written_table, "federated_tradeoff", 1),
        "training": training_table,
        "consistency": partial(consistency_table, "consistency", True),
        "consistency_cifar10": partial(consistency_table, "consistency_cifar10", False),
        "position_embeddings": position_table,
        "corruptions": corruption_table,
        "attention": attention_table,
        "backbones": partial(written_table, "backbones"),
        "ablation": partial(written_table, "ablation"),
        "masking_ratio": partial(written_table, "masking_ratio"),
        "overhead": overhead_table,
    }
    for name, make in blocks.items():
        table = make()
        block = f"<!-- {name} -->\n{table}\n<!-- /{name} -->"
        text, count = re.subn(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, b=block: b, text, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"README.md needs one <!-- {name} --> ... <!-- /{name} --> block, found {count}")
    path.write_text(text)


if __name__ == "__main__":
    main()
