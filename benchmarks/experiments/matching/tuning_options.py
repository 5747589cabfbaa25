"""Options of the choice of settings for gradient matching."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from attacks.registry import UsageError
from experiments.scaffold import AttackOptions, check_positive
from fedmjp.budgets import build_attack, read_attack_options, searches


@dataclass(frozen=True)
class TuningOptions(AttackOptions):
    """Choose rates and weights of priors of the attacks that search, on images that gradient_matching.py leaves alone.

    Clients hold one image each and have no defence. The settings of an attack are varied one after the other in the
    order of --grid, the earlier ones at the best of their values, the later ones at the attack's own: the value with
    the highest mean PSNR is kept. That is what an attacker can do who has photographs of its own and the model.

        python benchmarks/matching_tuning.py --images cifar10 --data-path DIR
        python benchmarks/matching_tuning.py --grid dlg.rate=0.1+1 dlg.steps=100+200

    Writes rows.jsonl.gz, table.csv and run.json to --out, and prints the chosen settings as --attack-options of
    gradient_matching.py takes them; --resume goes on with an unfinished run.
    """

    model: str = "vit_mini_32"
    """Plain model."""
    weights: str = "auto"
    """random, timm, auto (shipped weights, else random), long (of a longer training), or a checkpoint's path."""
    images: str = "photos"
    """photos (embedded), a folder of pictures, or a data set's name."""
    data_path: Path | None = None
    """Local copy of the data set named in --images."""
    scored: int = 16
    """Images that are scored elsewhere (--num-images of gradient_matching.py) and not used here."""
    num_images: int = 4
    """Others, on which settings are compared."""
    grid: tuple[str, ...] = (
        "inverting_gradients.rate=0.1+0.03+0.3",
        "inverting_gradients.tv=0.2+0.02+0.002+0.6+2",
        "gradvit.rate=0.3+0.1+0.03",
        "gradvit.tv=0.05+0.005+0.0005+0.2+0.8+3+10+30+100",
        "gradvit.borders=0.02+0.1+0.5",
    )
    """Values of settings, as ATTACK.setting=VALUE+VALUE."""
    steps: int = 500
    """Steps of each search, unless --grid varies them."""
    seed: int = 0
    """Fixes random weights and starts."""
    out: Path = Path("runs/matching_tuning")
    """Folder of rows and table (the committed ones stand in results/matching_tuning)."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        from fedmjp.models import split_name

        check_positive(self, "scored", "num_images", "steps")
        if not self.grid:
            raise UsageError("--grid needs at least one ATTACK.setting=VALUE+VALUE")
        split_name(self.model)
        for name, settings in self.read_grid().items():
            if not searches(name):
                raise UsageError(f"--grid {name}: {name} does not search; it has no steps")
            for setting, values in settings.items():
                for value in values:
                    build_attack(name, {setting: value})
        super().validate()

    def read_grid(self) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        """The values of each setting, by attack.

        Raises:
            UsageError: an entry of another form, or no such attack.
        """
        attacks = list(dict.fromkeys(entry.partition(".")[0] for entry in self.grid))
        found = read_attack_options(self.grid, attacks, "--grid")
        return {a: {key: tuple(text.split("+")) for key, text in own.items()} for a, own in found.items()}
