"""Options of gradient matching."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from attacks import ATTACKS, ThreatModel, UsageError
from experiments.scaffold import DefendedOptions, WorkerOptions, check_names, check_positive
from fedmjp.budgets import ALL, AUTO, build_attack, read_attack_options

ATTACKS_USED = (
    "Attacks to run: all, or names. There is no auto: it keeps to a time, and here the steps that are asked set the "
    f"time of a search. Choose from: all, {', '.join(ATTACKS)}."
)


@dataclass(frozen=True)
class Options(DefendedOptions, WorkerOptions):
    """How far does gradient matching get on Vision Transformers?

    Clients send the whole gradient of one batch; attacks search for images that give the same gradient. Rows by model,
    number of images in the batch, defence (none, and --defense, where it has the option gamma at each of --gammas) and
    number of steps, closed forms beside them. The clients' loss is the cross-entropy alone. Every answer is compared
    with the original images (setting `original`) and, under a defence, with what the model saw (setting `seen`). A
    table says by how much each attack beats the best guess without a gradient, image by image, and gives the verdict.

        python benchmarks/gradient_matching.py --batches 1 2 4 8 --gammas 0.1 0.5 0.9 --steps 60
        python benchmarks/gradient_matching.py --batches 1 --gammas --steps 15 240 --attacks gradvit --resume
        python benchmarks/gradient_matching.py --batches 1 --attacks gradvit --init mjp_subspace --resume
        python benchmarks/gradient_matching.py --batches 1 --gammas --steps 4000 --attacks gradvit
            --attack-options gradvit.rate=0.1,gradvit.tv=0.005
        python benchmarks/gradient_matching.py --batches 1 --defense noise --noise-multiplier 0.01

    The number of steps decides: papers search for thousands, the default here is what a CPU does in minutes.

    Writes rows.jsonl.gz, table.csv, matching.png, reconstructions.png and run.json to --out; --resume goes on with an
    unfinished run, or adds batches, steps and attacks to a finished one. One model a folder.
    """

    model: str = "vit_mini_32"
    """Plain model; the defence turns it into the variant it needs."""
    weights: str = "auto"
    """random, timm, auto (shipped weights, else random), long (of a longer training), or a checkpoint's path."""
    image_size: int | None = None
    """Pixels of an image's side (none: the model's own size); positions are resampled."""
    images: str = "photos"
    """photos (embedded), a folder of pictures, or a data set's name."""
    data_path: Path | None = None
    """Local copy of the data set named in --images."""
    num_images: int = 8
    """Most images; those that fill no batch are left over."""
    batches: tuple[int, ...] = (1, 4)
    """Images in a client's batch."""
    gammas: tuple[float, ...] = (0.5,)
    """Masking ratios of the defence, beside no defence (none given: no defence alone)."""
    attacks: Annotated[tuple[str, ...], tyro.conf.arg(help=ATTACKS_USED)] = (
        "patch_embedding",
        "mjp_subspace",
        "idlg",
        "inverting_gradients",
        "see_through_gradients",
        "april_optimisation",
        "gradvit",
    )
    steps: tuple[int, ...] = (20,)
    """Numbers of steps of the attacks that search."""
    attack_options: tuple[str, ...] = ()
    """Settings of attacks, as ATTACK.setting=value (gradvit.rate=0.1); matching_tuning.py finds good ones."""
    init: str = "randn"
    """Start of the attacks that search: randn, zeros, or the name of a closed form whose answer is refined."""
    restarts: int = 1
    """Starts for each client."""
    seed: int = 0
    """Fixes random weights, masks, jigsaws and starts."""
    together: int = 8
    """Images searched for at once."""
    pictures: int = 3
    """Embedded photographs in the figure of reconstructions (0: no figure)."""
    out: Path = Path("runs/gradient_matching")
    """Folder of rows, table and figures (the committed ones stand in results/gradient_matching)."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        from fedmjp.models import split_name

        if AUTO in self.attacks:
            raise UsageError("--attacks auto keeps to a time, which --steps sets here; pass names, or all")
        check_names(ATTACKS, [name for name in self.attacks if name != ALL])
        check_positive(self, "num_images", "together", "restarts", "image_size")
        for option in ("batches", "steps"):
            if not getattr(self, option) or min(getattr(self, option)) < 1:
                raise UsageError(f"--{option} takes numbers of at least 1")
        if max(self.batches) > self.num_images:
            raise UsageError(f"--batches {max(self.batches)} needs at least as many --num-images")
        if not 0 <= self.pictures <= 12:
            raise UsageError(f"--pictures must lie between 0 and 12, not {self.pictures}")
        if not self.attacks:
            raise UsageError("--attacks needs at least one name")
        self.sweep(self.gammas)
        split_name(self.model)
        super().validate()
        for name, attack in self.build_attacks(self.steps[0]).items():
            attack.require(ThreatModel(), name)

    def pixels(self) -> int:
        """Of an image's side."""
        from fedmjp.models import MODELS, split_name

        return self.image_size or MODELS.get(split_name(self.model)[0]).image_size

    def names(self) -> tuple[str, ...]:
        """The attacks that are asked for; of all, those that can be run here."""
        from fedmjp.audit.suite import select_attacks

        return tuple(select_attacks(self.attacks, [], ThreatModel()).chosen)

    def build_attacks(self, steps: int, on_step: Any = None) -> dict[str, Any]:
        """The attacks by name, those that search with this number of steps.

        Args:
            on_step: called by an attack that searches with (steps done, steps, losses).
        """
        asked = {"steps": steps, "init": self.init, "restarts": self.restarts, "seed": self.seed, "on_step": on_step}
        names = self.names()
        settings, found = read_attack_options(self.attack_options, names), {}
        for name in names:
            own = settings.get(name, {})
            known = {f.name for f in fields(ATTACKS.get(name))} - set(own)
            found[name] = replace(build_attack(name, own), **{k: v for k, v in asked.items() if k in known})
        return found
