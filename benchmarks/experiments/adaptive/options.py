"""Options of the leakage under attacks that know the defence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from attacks import ATTACKS, ThreatModel
from attacks.registry import UsageError
from experiments.scaffold import DefendedOptions, SuiteOptions, WorkerOptions, check_positive, sweep
from fedmjp.budgets import AUTO
from fedmjp.config import ATTACKS_HELP, AuditConfig

# Updates after which the server attacks, by masking ratio: the larger the mask, the more updates it takes.
UPDATES = {0.1: (1, 2, 3, 4, 6), 0.3: (1, 2, 4, 6, 9), 0.5: (1, 4, 8, 16, 24), 0.9: (1, 20, 40, 80)}
OTHER_UPDATES = (1, 2, 4, 8)
ATTACKS_USED = (
    f"{ATTACKS_HELP} Chosen for each gamma by its first clients' updates: at the default budget the closed forms (1 to "
    "3 s an image of a DeiT-S on one core), and unmix where it takes less than 10 s. april runs on APRIL's block "
    "alone."
)
UPDATE_ATTACKS_USED = (
    "Attacks of the second experiment. auto and all: here those that read more than one update, chosen for each gamma "
    "and number of updates; the others give the same answer after every update. mjp_rounds is asked for by name, "
    "because 20 updates of a DeiT-S take it longer than the default budget; unmix_rounds takes 1 to 200 s an image."
)


@dataclass(frozen=True)
class Options(DefendedOptions, SuiteOptions, WorkerOptions):
    """What does a defence hide from an adversary that knows it?

        python benchmarks/mjp_adaptive.py                                        MJP
        python benchmarks/mjp_adaptive.py --defense NAME --attacks ... --update-attacks ...
        python benchmarks/mjp_adaptive.py --attacks april patch_embedding mjp_subspace --update-attacks mjp_rounds
        python benchmarks/mjp_adaptive.py --model vit_ti --weights FILE.safetensors --image-size 160
        python benchmarks/mjp_adaptive.py --mask-sampler released --jigsaw-per batch --jigsaw-warmup 20
        python benchmarks/mjp_adaptive.py --model vit_mini_64 --weights auto --mask-choices block random attention
            attended fixed --schedules paper

    Two experiments on the same photographs, whose masks are drawn anew in every update, gradients in float32:

    - leakage against gamma, one update: the naive closed forms (APRIL's on APRIL's block, for which it is exact) beside
      the attacks that know the defence;
    - leakage against the number of updates of one image, for several gamma, with the masks of the paper (every step)
      and of the released code (every other step is not jigsawed at all). The model moves between updates.

    Clients train with the whole loss of the defence, the localisation term included; batches of one image. Every
    reconstruction is compared with the original image; `psnr_visible` counts the visible patches alone,
    `psnr_visible_exact` the errors of the masked ones. A defence without the option gamma is attacked once, as its
    options say; one without jigsaw_probability under one schedule.

    Writes rows.jsonl.gz, one_update.csv, updates.csv, leakage.png, round_by_round.png and run.json to --out (and
    one_update.png with --pictured-gamma); --resume goes on with an unfinished run.
    """

    model: str = "deit_s"
    """Plain model; the defence turns it into the variant it needs."""
    weights: str = "random"
    """random, timm, auto, long, or a checkpoint's path."""
    image_size: int | None = None
    """Pixels of a side, for a plain ViT, whose position embedding is resampled (None: the model's own)."""
    images: str = "photos"
    """photos (embedded), a folder of pictures, or a data set's name."""
    num_images: int = 50
    """Most images."""
    gammas: tuple[float, ...] = (0.03, 0.1, 0.3, 0.5, 0.7, 0.9)
    """Masking ratios of the first experiment (defences with the option gamma)."""
    attacks: Annotated[tuple[str, ...], tyro.conf.arg(help=ATTACKS_USED)] = (AUTO,)
    update_gammas: tuple[float, ...] = tuple(UPDATES)
    """Masking ratios of the second experiment (defences with the option gamma)."""
    update_attacks: Annotated[tuple[str, ...], tyro.conf.arg(help=UPDATE_ATTACKS_USED)] = ("mjp_rounds", AUTO)
    updates: tuple[int, ...] = ()
    """Numbers of updates after which to attack (none given: 1 to 6 at gamma 0.1, up to 80 at 0.9, else 1 to 8)."""
    schedules: tuple[Literal["paper", "released"], ...] = ("paper", "released")
    """Jigsaw in every step, or with probability 1/2 as in the released code."""
    mask_choices: tuple[Literal["block", "random", "attention", "attended", "fixed"], ...] = ()
    """Choices of masks to compare, instead of --mask-choice (defences with that option); the table is of them."""
    pictured_gamma: float | None = None
    """Also draw one_update.png: three embedded photographs at this masking ratio, and what --attacks make of one update
    of each."""
    grants: tuple[str, ...] = AuditConfig().grants
    """What the adversary sees beyond an update; an attack that needs more is refused."""
    drift: float = 0.01
    """How far the weights move between updates, relative to their size."""
    seed: int = 0
    """Fixes weights, masks and drift."""
    batch_size: int = 10
    """Images whose updates are computed together."""
    out: Path = Path("runs/mjp_adaptive")
    """Folder of rows, tables and figures (the committed ones stand in results/mjp_adaptive)."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        check_positive(self, "num_images", "batch_size", "updates", "image_size")
        if not self.defenses((*self.gammas, *self.update_gammas)):
            raise UsageError("neither --gammas nor --update-gammas names a masking ratio: there is nothing to attack")
        if self.pictured_gamma is not None:
            self.defenses([self.pictured_gamma])
        super().validate()
        for name in self.named():
            ATTACKS.get(name)().require(ThreatModel.parse(self.grants), name)

    def defenses(self, gammas: Sequence[float]) -> list:
        """The defence at each of `gammas` and with each of --mask-choices; see `sweep`."""
        found = self.sweep(gammas)
        if not self.mask_choices:
            return found
        if not self.has("mask_choice"):
            raise UsageError(f"--defense {self.defense} has no option mask_choice; drop --mask-choices")
        found = [one for given in found for one in sweep(given, "mask_choice", self.mask_choices)]
        for one in found:
            one.validate()
        return found

    def every_attack(self) -> tuple[str, ...]:
        """The attacks of both experiments."""
        return (*self.attacks, *self.update_attacks)
