"""Does MJP make a ViT more robust to common corruptions?  Tables 4 and 9 of the MJP paper.

    python benchmarks/corruptions.py --data tiny-imagenet --data-path DIR           every shipped 64-pixel checkpoint
    python benchmarks/corruptions.py --model vit_mini_64 vit_mini_64_mjp=FILE.safetensors --data tiny-imagenet ...

Top-1 error on test images under the fifteen corruptions of ImageNet-C at severities 1 to 5, on the very same pictures
for every model, and on the untouched images. A corruption's error is the mean over its severities; CE is that error in
per cent of the reference model's, mCE the mean of CE, as in ImageNet-C, whose reference is AlexNet. What the paper
calls mCE has no reference: for DeiT-S it is the plain mean of the ten errors in its Table 9, for its MJP model it is
less than that mean. So errors are also averaged plainly, over those ten and over all. A model that is worse on
untouched images is worse on corrupted ones too; the rise above the error on untouched images tells the two apart.

ImageNet-A and -O, the other half of Table 4, are photographs of their own that no package ships: not measured here.
How the pictures are made, and where that departs from ImageNet-C: `corrupted.py`.

Intervals are 95 % bootstrap intervals over images, paired between models; they say nothing of another training of the
same model. Writes rows.jsonl.gz (a line a model, corruption and severity, with every image's answer), table.csv,
summary.csv and corruptions.png to --out. A run that was stopped goes on with --resume.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from attacks import UsageError
from experiments.trained_models import corrupted
from experiments.trained_models.checkpoints import load_trained, sources_of
from experiments.trained_models.corrupted import CLEAN, CORRUPTIONS, SEVERITIES
from fedmjp.cli import guarded, parse, split_commas, terminal
from fedmjp.client import usable_device
from fedmjp.data import DataBundle, load_data
from fedmjp.metrics import bootstrap_statistic
from fedmjp.models import MODELS, BuiltModel, split_name
from fedmjp.records import provenance
from fedmjp.records.rows import Schema, pack_rows, unpack_rows
from fedmjp.records.run_record import note_run
from fedmjp.report import RowLog
from fedmjp.report.figures import NORMAL, SMALL, save, style

HERE = Path(__file__).resolve().parents[2]
BATCH = 100
MEASURES = ("error", "difference", "ce", "rise", "rise_difference")
TEN = "table 9"  # the ten corruptions of the paper's Table 9
# What was asked, and so what tells rows apart; `subset` and `state` name the images and the weights by their content.
CASE = ("dataset", "subset", "images", "model", "state", "package", "size", "seed", "corruption", "severity")
ROWS = Schema(
    (*CASE, "weights", "run_id", "commit", "version", "torch_version", "device", "error", "wrong"), identity=CASE
)


@dataclass(frozen=True)
class Options:
    """Top-1 error of trained models under the corruptions of ImageNet-C."""

    model: tuple[str, ...] = ()
    """MODEL for its shipped checkpoint, or MODEL=FILE (none given: every shipped 64-pixel checkpoint)."""
    reference: str = "vit_mini_64"
    """The model against which CE and differences are taken."""
    data: str = "tiny-imagenet"
    """Data set whose test images are taken; the models must have been trained on its classes."""
    data_path: Path | None = None
    """Local copy of --data."""
    num_images: int | None = 1000
    """Use a random subset of this many test images."""
    corruptions: tuple[str, ...] = CORRUPTIONS
    """Names as in ImageNet-C."""
    severities: tuple[int, ...] = SEVERITIES
    """1 to 5."""
    seed: int = 0
    """Fixes subset and corruptions."""
    device: str = "cpu"
    """cpu, cuda, or cuda:INDEX; pictures are corrupted on the CPU."""
    threads: int = 0
    """Torch threads (0: torch's own choice)."""
    out: Path = Path("runs/corruptions")
    """Folder of rows, tables and figure (the committed ones stand in results/corruptions)."""
    resume: bool = False
    """Go on with the rows in --out."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        sources = sources_of(self.model)
        unknown = sorted(set(self.corruptions) - set(CORRUPTIONS))
        if unknown or not self.corruptions:
            raise UsageError(f"--corruptions {' '.join(unknown) or 'none'}: choose from: {', '.join(CORRUPTIONS)}")
        if not self.severities or not set(self.severities) <= set(SEVERITIES):
            raise UsageError("--severities takes numbers from 1 to 5")
        if self.reference not in sources:
            raise UsageError(f"--reference {self.reference} is none of the models: {', '.join(sources)}")
        sizes = {name: MODELS.get(split_name(name)[0]).image_size for name in sources}
        if len(set(sizes.values())) > 1:
            raise UsageError(f"models of one image size see the same pictures, these take {sizes}; run them apart")
        if self.seed < 0 or self.threads < 0:
            raise UsageError("--seed and --threads must not be negative")
        if any(self.out.glob("rows.jsonl*")) and not self.resume:
            raise UsageError(f"{self.out} holds rows already; pass --resume to go on with them, or another --out")
        corrupted.load_package()

    def cells(self) -> list[tuple[str, int]]:
        """(corruption, severity), the untouched images first."""
        return [(CLEAN, 0), *((c, s) for c in dict.fromkeys(self.corruptions) for s in sorted(set(self.severities)))]


class Run:
    """One call of the benchmark."""

    def __init__(self, options: Options, console: Console) -> None:
        options.validate()
        if options.threads:
            torch.set_num_threads(options.threads)
        self.options, self.console, self.device = options, console, usable_device(options.device)
        sources = sources_of(options.model)
        size = MODELS.get(split_name(options.reference)[0]).image_size
        self.bundle: DataBundle = load_data(
            options.data, size=size, path=options.data_path, test_limit=options.num_images, seed=options.seed
        )
        self.models = {name: load_trained(name, source, self.bundle) for name, source in sources.items()}
        images = self.bundle.test
        self.shared = {
            "dataset": self.bundle.name,
            "subset": _digest("\n".join(images.ids).encode()),
            "images": len(images),
            "package": corrupted.load_package()[1],
            "size": size,
            "seed": options.seed,
        }
        self.states = {name: fingerprint(model) for name, model in self.models.items()}
        asked = {k: str(v) for k, v in vars(options).items() if k not in ("out", "resume", "device", "threads")}
        self.columns = {"run_id": provenance.run_id(asked), **provenance.columns(self.device)}

    def __call__(self) -> None:
        """Measure what is missing, then write tables and figure."""
        out = self.options.out
        unpack_rows(out / "rows.jsonl")
        with RowLog(out / "rows.jsonl", ROWS) as log:
            self.measure(log)
            rows = [row for row in log.rows() if self.is_asked(row)]
        frame = pd.DataFrame(rows)
        wrong = answers(frame)
        table, summary = tables({name: wrong[name] for name in self.models}, self.options.reference)
        told = {"data": self.bundle.name, "images": len(self.bundle.test), "seed": self.options.seed}
        told["commit"] = "+".join(sorted(frame["commit"].unique()))
        named = dict(zip(frame["model"], frame["weights"], strict=True))
        for name, measured in (("table.csv", table), ("summary.csv", summary)):
            ours = measured.assign(source="measured", weights=measured["model"].map(named), **told)
            whole = pd.concat([ours, paper_lines(name)], ignore_index=True)
            whole.to_csv(out / name, index=False, float_format="%.5g")
        figure(table, self.options.reference, out / "corruptions.png")
        shown = summary.drop(columns=[c for c in summary if c.endswith(("_low", "_high"))])
        self.console.print(shown.to_string(index=False, na_rep="", float_format="%.2f"), highlight=False)
        note_run(out, "python benchmarks/corruptions.py", frame, images=self.bundle.provenance)
        pack_rows(out / "rows.jsonl")
        self.console.print(f"rows, tables and figure: {out}", soft_wrap=True, highlight=False)

    def is_asked(self, row: dict[str, Any]) -> bool:
        """Whether a row of the log is one of this call's."""
        cell = (row["corruption"], row["severity"])
        same = all(row[key] == value for key, value in self.shared.items())
        return same and row["state"] == self.states.get(row["model"]) and cell in self.options.cells()

    def measure(self, log: RowLog) -> None:
        """Append every missing row."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        cells, images = self.options.cells(), self.bundle.test
        with Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True) as bar:
            task = bar.add_task("", total=len(cells) * len(images))
            for number, (corruption, severity) in enumerate(cells):
                cases = {
                    name: {**self.shared, "model": name, "state": state, "corruption": corruption, "severity": severity}
                    for name, state in self.states.items()
                }
                missing = {name: case for name, case in cases.items() if not log.has(case)}
                bar.update(task, description=f"{corruption} {severity or ''}", completed=number * len(images))
                wrong: dict[str, list[Tensor]] = {name: [] for name in missing}
                for pictures, labels in self.batches(corruption, severity) if missing else ():
                    for name in missing:
                        wrong[name].append(mistakes(self.models[name], pictures.to(self.device), labels))
                    bar.advance(task, len(labels))
                for name, case in missing.items():
                    every = torch.cat(wrong[name])
                    found = {"error": 100 * float(every.double().mean()), "wrong": "".join(map(str, every.tolist()))}
                    log.append({**self.columns, **case, "weights": self.models[name].provenance, **found})

    def batches(self, corruption: str, severity: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(corrupted images, labels) in order."""
        images = self.bundle.test
        for start in range(0, len(images), BATCH):
            indices = range(start, min(start + BATCH, len(images)))
            ids = [images.ids[i] for i in indices]
            pictures = corrupted.corrupt(images.images(indices), ids, corruption, severity, self.options.seed)
            yield pictures, images.labels[start : start + BATCH]


@torch.no_grad()
def mistakes(model: BuiltModel, pictures: Tensor, labels: Tensor) -> Tensor:
    """(B,) uint8: 1 where the model's answer to images (B, C, H, W) in [0, 1] is wrong."""
    model.module.to(pictures.device).eval()
    return (model.module(model.normalise(pictures)).argmax(dim=1).cpu() != labels).byte()


def answers(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Model -> frame of 0 and 1 (wrong), a row an image and a column a (corruption, severity), in the rows' order.

    The first column is (CLEAN, 0).
    """
    return {
        model: pd.DataFrame(
            {(r.corruption, r.severity): np.frombuffer(r.wrong.encode(), np.uint8) - ord("0") for r in own.itertuples()}
        )
        for model, own in rows.groupby("model", sort=False)
    }


def paper_corruptions() -> list[str]:
    """The ten corruptions of the paper's Table 9."""
    return list(dict.fromkeys(pd.read_csv(HERE / "paper" / "mjp_table9.csv")["corruption"]))


def measures(means: np.ndarray, groups: Sequence[list[int]]) -> np.ndarray:
    """`MEASURES` of each group of corruptions, (..., groups * measures), from mean errors in per cent.

    Args:
        means: (..., 2 * (1 + C)): on untouched images and under C corruptions, the model's and then the reference's.
        groups: places among the C corruptions; an empty group stands for the untouched images.
    """
    mine, theirs = np.split(means, 2, axis=-1)
    found = []
    for group in groups:
        own, other = ((m[..., 1:][..., group] if group else m[..., :1]) for m in (mine, theirs))
        rise, other_rise = own.mean(axis=-1) - mine[..., 0], other.mean(axis=-1) - theirs[..., 0]
        with np.errstate(divide="ignore", invalid="ignore"):  # a reference that errs nowhere leaves CE open
            ce = (100 * own / other).mean(axis=-1)
        found += [own.mean(axis=-1), (own - other).mean(axis=-1), ce, rise, rise - other_rise]
    return np.stack(found, axis=-1)


def tables(wrong: dict[str, pd.DataFrame], reference: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Table 9, a line a model and a corruption, and its means, a line a model and a group of corruptions; in per cent.

    Args:
        wrong: as `answers` gives it; the same columns for every model, each corruption at the same severities.
        reference: a key of `wrong`.
    """
    names = [c for c in dict.fromkeys(wrong[reference].columns.get_level_values(0)) if c != CLEAN]
    errors = {
        model: 100 * np.stack([own[c].to_numpy(float).mean(axis=1) for c in (CLEAN, *names)], axis=1)
        for model, own in wrong.items()
    }  # (images, 1 + corruptions) each
    ten = [names.index(c) for c in paper_corruptions() if c in names]
    means = {CLEAN: [], TEN: ten, "all": list(range(len(names)))}
    means = {name: group for name, group in means.items() if group or name == CLEAN}
    groups = [[place] for place in range(len(names))] + list(means.values())
    lines, summary = [], []
    for model, own in errors.items():
        both = np.concatenate([own, errors[reference]], axis=1)
        three = np.stack(bootstrap_statistic(both, partial(measures, groups=groups)), axis=-1)
        found = three.reshape(len(groups), len(MEASURES), 3)
        for name, values in zip(names, found, strict=False):
            severities = {f"error_{severity}": 100 * share for severity, share in wrong[model][name].mean().items()}
            lines.append({"model": model, "corruption": name} | _named(values) | severities)
        for (name, group), values in zip(means.items(), found[len(names) :], strict=True):
            summary.append({"model": model, "corruptions": name, "counted": len(group)} | _named(values))
    return pd.DataFrame(lines), pd.DataFrame(summary).rename(columns=lambda column: re.sub("^ce", "mce", column))


def paper_lines(name: str) -> pd.DataFrame:
    """The paper's Table 9 for table.csv, its Table 4 for summary.csv, there with the mean of Table 9's ten errors."""
    ninth = pd.read_csv(HERE / "paper" / "mjp_table9.csv")
    if name == "table.csv":
        return ninth.assign(source="paper, Table 9")
    fourth = pd.read_csv(HERE / "paper" / "mjp_table4.csv").rename(columns={"mce": "printed_mce"})
    columns = {"source": "paper, Tables 4 and 9", "corruptions": TEN, "counted": ninth["corruption"].nunique()}
    return fourth.assign(**columns, error=fourth["model"].map(ninth.groupby("model")["error"].mean()))


def figure(table: pd.DataFrame, reference: str, path: Path) -> None:
    """Errors by corruption, and what they differ from the reference's by, with the paper's differences."""
    names = list(dict.fromkeys(table["corruption"]))
    drawing = Figure(figsize=(6.8, 0.9 + 0.25 * len(names)), layout="constrained")
    panels = drawing.subplots(1, 2, sharey=True)
    models = list(dict.fromkeys(table["model"]))
    for index, model in enumerate(models):
        own = table[table["model"] == model].set_index("corruption").loc[names]
        places = np.arange(len(names)) + 0.3 * (index - (len(models) - 1) / 2) / max(1, len(models) - 1)
        kind = style(index) | {"ls": "", "ms": 3.5, "elinewidth": 0.9, "capsize": 1.5}
        for axes, column in zip(panels, ("error", "difference"), strict=True):
            if column == "error" or model != reference:
                spread = np.stack([own[column] - own[f"{column}_low"], own[f"{column}_high"] - own[column]]).clip(min=0)
                axes.errorbar(own[column], places, xerr=spread, label=model, **kind)
    paper = pd.read_csv(HERE / "paper" / "mjp_table9.csv").pivot(index="corruption", columns="model", values="error")
    theirs = (paper["deit_s_mjp"] - paper["deit_s"]).reindex(names)
    panels[1].plot(theirs, np.arange(len(names)), "k|", ms=7, label="paper's Table 9, deit_s_mjp")
    panels[1].axvline(0, color="#9a9a9a", lw=0.8, zorder=0)
    panels[0].set_yticks(np.arange(len(names)), [n.replace("_", " ") for n in names])
    panels[0].invert_yaxis()
    words = ("Top-1 error, mean over severities (%)", f"Difference from {reference} (points)")
    for axes, told in zip(panels, words, strict=True):
        axes.set_xlabel(told, fontsize=NORMAL)
        axes.tick_params(labelsize=SMALL)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#eeeeee", lw=0.6)
        axes.set_axisbelow(True)
    handles = {label: h for axes in panels for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    drawing.legend(
        handles.values(), handles, loc="outside lower center", ncols=len(handles), fontsize=SMALL, frameon=False
    )
    save(drawing, path)


def _named(values: np.ndarray) -> dict[str, float]:
    """(measures, 3) -> a line's entries."""
    kinds = [f"{measure}{part}" for measure in MEASURES for part in ("", "_low", "_high")]
    return dict(zip(kinds, map(float, values.ravel()), strict=True))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:10]


def fingerprint(model: BuiltModel) -> str:
    """Ten hexadecimal digits of the SHA-256 of all weights."""
    return _digest(
        b"".join(v.detach().cpu().contiguous().numpy().tobytes() for v in model.module.state_dict().values())
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0, 2 for a mistake of usage, 130 for an interrupt."""
    options = split_commas(parse(Options, "python benchmarks/corruptions.py", Options.__doc__, arguments))
    hint = f"finished rows are in {options.out}; go on with --resume --out {options.out}"
    return guarded(lambda: Run(options, terminal())(), lambda: hint)


if __name__ == "__main__":
    sys.exit(main())
