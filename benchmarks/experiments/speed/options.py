"""Options of the measures of speed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from attacks import UsageError
from experiments.scaffold import RESULTS, DeviceOptions, check_positive
from fedmjp.models.registry import MODELS, split_name
from fedmjp.workers.options import WorkerConfig


@dataclass(frozen=True)
class SpeedOptions(DeviceOptions):
    """How fast is the leakage benchmark?

    All in one run, taken in turn, as ratios, for each block with the attack that fits it (april: april; standard:
    patch_embedding):

    - our path (gradients of the attacked layers, solve, every metric) against the bare batched forward and backward
      pass;
    - the `breaching` package's AprilAttacker, with its own gradient an image and the same scoring, against our path;
    - the linear solve by each of LAPACK's drivers, on the same gradients;
    - peak memory of each, on a CPU in a process of its own;
    - gradient matching, a step: the package's Inverting Gradients, ours with the same arithmetic (every weight's
      gradient, one client), and ours as it runs, for one client and for eight together.

    Writes speed.csv, drivers.csv, matching.csv and run.json to --out.
    """

    model: str = "deit_s"
    """Model, random weights."""
    images: int = 16
    """Images a measurement."""
    batch_size: int = 16
    """Images a pass."""
    repeats: int = 5
    """Measurements of each kind; medians of pairwise ratios are reported."""
    lpips_weights: Path | None = None
    """State dict of lpips.LPIPS(net="squeeze"); without it LPIPS is left out, and the table says so."""
    parts: tuple[Literal["leakage", "matching"], ...] = ("leakage", "matching")
    """What to measure: the closed forms' path (leakage), gradient matching, or both."""
    matching_model: str = "vit_mini_32"
    """Model of the gradient matching, random weights."""
    matching_batches: tuple[int, ...] = (1, 4)
    """Images in a victim's batch."""
    matching_rounds: int = 15
    """Rounds of the gradient matching, each of all ways to take a step; ratios of their means are reported."""
    out: Path = RESULTS / "speed"
    """Folder of the tables."""

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
        super().validate()
        check_positive(self, "images", "batch_size", "repeats", "matching_batches", "matching_rounds")


@dataclass(frozen=True)
class StepOptions(DeviceOptions):
    """What does MJP cost a training step?

    Times one client step (forward, backward) of a DeiT-S at batch 16 with and without MJP, alternating so that a busy
    machine affects both alike, and the masks and jigsaws alone against a version that loops over images and blocks in
    Python, as the released code does. The paper reports +2 % an epoch (appendix B). Writes overhead.csv and run.json to
    --out.
    """

    model: str = "deit_s"
    """Model without its _mjp suffix."""
    batch_size: int = 16
    """Images a step."""
    steps: int = 12
    """Timed steps of each kind; the median pairwise ratio is reported."""
    gammas: tuple[float, ...] = (0.1, 0.5, 0.9)
    """Masking ratios."""
    out: Path = RESULTS / "mjp_overhead"
    """Folder of the table."""

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
        super().validate()
        check_positive(self, "batch_size", "steps")


@dataclass(frozen=True)
class RoundOptions:
    """What does Flower cost a round?

    Processor time of a federated round (local engine, messages and all) against a plain PyTorch loop that computes the
    same clients' gradients and takes the same step, with one thread, round by round in turn in one process. Writes
    overhead.csv and run.json to --out.
    """

    models: tuple[str, ...] = ("vit_mini_64", "deit_ti", "deit_s")
    """Models to time."""
    clients: int = 8
    """Clients a round."""
    batch_sizes: tuple[int, ...] = (1, 8)
    """Images a client; at 1 the messages weigh most."""
    repeats: int = 12
    """Timed rounds of each kind; medians are reported."""
    resume: bool = False
    """Keep the rows in --out of models and batch sizes that are not asked for."""
    out: Path = RESULTS / "round_overhead"
    """Folder of the table."""

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
        check_positive(self, "clients", "batch_sizes", "repeats")


@dataclass(frozen=True)
class CampaignOptions:
    """How much faster is a campaign of attacks in several processes?

    The campaign is `mjp_subspace` on one update of each client, which holds one photograph and is defended by MJP:
    decoding, gradients, attack and metrics, without LPIPS. It is run in one process, then with --workers, then on Ray
    where --ray is given, and so on in turn, one thread each; the rows must be the same. Wall-clock time, CPU time and
    the load average at the start of each run stand in runs.csv, the ratios within a turn in table.csv. On a machine
    that does other work, wall-clock times are distorted; the CPU time of the parent and an even share of that of its
    workers (core_seconds) is what a core has to do in any case.

    Writes runs.csv after every run, table.csv and run.json to --out; --resume adds the runs that are missing.
    """

    model: str = "deit_s"
    """Plain model; the defence turns it into the variant it needs."""
    weights: str = "random"
    """random, timm, auto, long, or a checkpoint's path."""
    images: str = "photos"
    """photos (embedded), a folder of pictures, or a data set's name."""
    num_images: int = 100
    """Most images (photos has 96)."""
    gamma: float = 0.5
    """Masking ratio."""
    batch_size: int = 4
    """Images of a task."""
    workers: int = 2
    """Processes of the runs in several."""
    ray: str = ""
    """Address of a Ray cluster to compare, too, as the campaigns take it (local: one on this machine)."""
    repeats: int = 3
    """Turns."""
    resume: bool = False
    """Keep the runs that are in --out."""
    out: Path = RESULTS / "campaign_speed"
    """Folder of the tables."""

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
        check_positive(self, "num_images", "batch_size", "repeats")
        WorkerConfig(self.workers, self.ray).check("cpu", 1)
        if self.workers < 2:
            raise UsageError(f"--workers must be at least 2, not {self.workers}: one process is measured anyway")

    def resume_hint(self) -> str:
        """How to go on after an interrupt."""
        return f"finished runs are in {self.out}; go on with --resume"


@dataclass(frozen=True)
class TrainingSpeedOptions(DeviceOptions):
    """How fast is training beside a bare timm loop?

    A step of `fedmjp.training` against one of a loop that holds nothing of this project: the same timm model, AdamW by
    timm, clipped gradients, cross-entropy, autocast. Both start from the same weights and take a step on the same batch
    in turn. The bare loop is measured twice: with timm's unfused attention, which this project takes on a CPU, and with
    torch's fused kernel, which timm takes. Drawing the batch is timed by itself, and counted once for each loop or left
    out. Times are of the processor on a CPU with one thread, and of the wall clock elsewhere.

    Writes runs.csv (a row a pair of steps), table.csv and run.json to --out.
    """

    threads: int = 1
    """Torch threads (0: torch's own choice, fewer while other programs keep cores busy)."""
    models: tuple[str, ...] = ("vit_mini_32", "vit_ti")
    """Plain ViTs, random weights."""
    image_sizes: tuple[int, ...] = (32, 160)
    """Pixels of a side, one for each model."""
    batch_sizes: tuple[int, ...] = (64, 32)
    """Images of a step, one for each model."""
    data: str = "photos"
    """photos, or a data set's name (`fedmjp.train --data`)."""
    data_path: Path | None = None
    """Local copy of a named data set."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of activations."""
    warm_up: int = 2
    """Steps before the first that counts."""
    repeats: int = 20
    """Pairs of steps; medians of their ratios are reported."""
    out: Path = RESULTS / "training_speed"
    """Folder of the tables."""

    def cases(self) -> list[tuple[str, int, int]]:
        """(model, pixels of a side, images of a step) of each measurement."""
        return list(zip(self.models, self.image_sizes, self.batch_sizes, strict=True))

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
        super().validate()
        check_positive(self, "image_sizes", "batch_sizes", "repeats")
        if self.warm_up < 0:
            raise UsageError(f"--warm-up must not be negative, but is {self.warm_up}")
        if not len(self.models) == len(self.image_sizes) == len(self.batch_sizes):
            raise UsageError("--models, --image-sizes and --batch-sizes take as many entries each")
        for model in self.models:
            name, variant = split_name(model)
            spec = MODELS.get(name)
            if variant or spec.vit is None or spec.speech:
                raise UsageError(f"--models takes plain ViTs, which a bare timm loop can train, not {model}")
