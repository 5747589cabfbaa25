"""How much does a jigsaw change a model's answer?  Tables 1 and 3, Figure 2 of the MJP paper.

    python benchmarks/consistency.py --data tiny-imagenet --data-path DIR           every shipped 64-pixel checkpoint
    python benchmarks/consistency.py --model vit_mini_64 vit_ti=FILE.safetensors --data tiny-imagenet --data-path DIR

What is measured, and how, stands in fedmjp/evaluation/consistency.py. An _mjp model sees the unknown position embedding
at the shuffled places, as in training, and once more its own positions there; an _idx model is told where patches come
from.

Intervals are 95 % bootstrap intervals over images; they say nothing of another training of the same model. Writes
table.csv and consistency.png to --out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from rich.console import Console

from attacks import UsageError
from experiments.trained_models.checkpoints import load_trained, sources_of
from fedmjp.cli import guarded, parse, split_commas, terminal
from fedmjp.client import usable_device
from fedmjp.data import load_data
from fedmjp.defenses import DEFENSES
from fedmjp.evaluation.consistency import measure, summarise
from fedmjp.models import MODELS, split_name
from fedmjp.records import provenance
from fedmjp.report.figures import NORMAL, SMALL, save, style

HERE = Path(__file__).resolve().parents[2]
SHOWN = ("model", "positions", "gamma", "accuracy", "diff_norm", "diff_share", "consistency", "images")


@dataclass(frozen=True)
class Options:
    """Accuracy, Diff. Norm. and Consistency of trained models under jigsaws."""

    model: tuple[str, ...] = ()
    """MODEL for its shipped checkpoint, or MODEL=FILE (none given: every shipped 64-pixel checkpoint)."""
    data: str = "tiny-imagenet"
    """Data set whose test images are taken; the models must have been trained on its classes."""
    data_path: Path | None = None
    """Local copy of --data."""
    num_images: int | None = None
    """Use a random subset of this many test images."""
    gammas: tuple[float, ...] = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
    """Shares of patches that are shuffled."""
    seed: int = 0
    """Fixes subset, masks and jigsaws, which are the same for every model of one patch grid."""
    device: str = "cpu"
    """cpu, cuda, or cuda:INDEX."""
    out: Path = Path("runs/consistency")
    """Folder of table and figure (the committed ones stand in results/consistency)."""
    resume: bool = False
    """Keep the lines of a table in --out for the models that are not asked for now."""

    def sources(self) -> dict[str, str]:
        """Model -> source of its weights (`trained.sources_of`)."""
        return sources_of(self.model)

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
        for gamma in self.gammas:
            DEFENSES.get("mjp")(gamma=gamma).validate()
        if not self.gammas or self.seed < 0:
            raise UsageError("--gammas needs at least one value, --seed must not be negative")
        if (self.out / "table.csv").exists() and not self.resume:
            raise UsageError(f"{self.out} holds a table already; pass --resume to add to it, or another --out")

    def kept(self) -> list[pd.DataFrame]:
        """Measured lines of the table in --out for other models than those asked for."""
        path = self.out / "table.csv"
        if not path.exists():
            return []
        before = pd.read_csv(path)
        return [before[(before["source"] == "measured") & ~before["model"].isin(self.sources())]]


def table(options: Options, device: torch.device) -> pd.DataFrame:
    """Our lines, then the paper's of Tables 1 and 3, which stand at gamma 0.5.

    Raises:
        UsageError: data or weights that are not there, or weights for other classes.
    """
    parts = []
    for name, source in options.sources().items():
        size = MODELS.get(split_name(name)[0]).image_size
        bundle = load_data(
            options.data, size=size, path=options.data_path, test_limit=options.num_images, seed=options.seed
        )
        model = load_trained(name, source, bundle)
        own = summarise(measure(model, bundle.test, options.gammas, seed=options.seed, device=device))
        parts.append(own.assign(source="measured", model=name, weights=model.provenance, data=bundle.provenance))
    ours = pd.concat(parts, ignore_index=True).assign(commit=provenance.commit(), seed=options.seed)
    return pd.concat([*options.kept(), ours, paper_lines()], ignore_index=True)


def paper_lines() -> pd.DataFrame:
    """The paper's figures; of Table 3 those that its text copy kept."""
    first = pd.read_csv(HERE / "paper" / "mjp_table1.csv").assign(source="paper, Table 1")
    third = pd.read_csv(HERE / "paper" / "mjp_table3.csv").assign(source="paper, Table 3", model="deit_s_mjp")
    return pd.concat([first, third], ignore_index=True).assign(gamma=0.5)


def figure(frame: pd.DataFrame, path: Path) -> None:
    """Figure 2's accuracy, and Consistency, against the masking ratio at inference."""
    drawing = Figure(figsize=(6.8, 3.1), layout="constrained")
    panels = drawing.subplots(1, 2)
    for index, ((model, way), group) in enumerate(frame.groupby(["model", "positions"], sort=False)):
        label = f"{model}, {'unknown' if way == 'unknown' else 'own'} positions"
        for axes, name in zip(panels, ("accuracy", "consistency"), strict=True):
            error = np.stack([group[name] - group[f"{name}_low"], group[f"{name}_high"] - group[name]]).clip(min=0)
            kind = style(index) | {"ms": 4, "lw": 1.2}
            axes.errorbar(group["gamma"], group[name], yerr=error, capsize=2, label=label, **kind)
    for axes, words in zip(panels, ("Accuracy on jigsawed images (%)", "Consistency (%)"), strict=True):
        axes.set_xlabel("Masking ratio at inference", fontsize=NORMAL)
        axes.set_ylabel(words, fontsize=NORMAL)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=SMALL)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=SMALL, frameon=False)
    save(drawing, path)


def run(options: Options, console: Console) -> None:
    """Write table and figure and print the table."""
    options.validate()
    frame = table(options, usable_device(options.device))
    options.out.mkdir(parents=True, exist_ok=True)
    frame.to_csv(options.out / "table.csv", index=False, float_format="%.5g")
    ours = frame[frame["source"] == "measured"]
    figure(ours, options.out / "consistency.png")
    console.print(ours[list(SHOWN)].to_string(index=False, float_format="%.3f"), highlight=False)
    console.print(f"table and figure: {options.out}", soft_wrap=True, highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    options = split_commas(parse(Options, "python benchmarks/consistency.py", Options.__doc__, arguments))
    return guarded(lambda: run(options, terminal()), lambda: "nothing was kept; run it again")


if __name__ == "__main__":
    sys.exit(main())
