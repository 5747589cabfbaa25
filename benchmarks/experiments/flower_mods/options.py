"""Options of the leakage under Flower's own mods."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attacks import ATTACKS
from attacks.registry import UsageError
from experiments.scaffold import AttackOptions, check_names, check_positive


@dataclass(frozen=True)
class Options(AttackOptions):
    """What does a server see of updates that pass Flower's own clipping and privacy mods?

        python benchmarks/flower_mods.py

    Flower's ServerApp strategies and ClientApp mods run as they are, in process: FedAvg without a mod, with
    fixedclipping_mod and adaptiveclipping_mod under their strategies (DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyClientSideAdaptiveClipping: noise is added to the mean), and with LocalDpMod at each of
    --epsilons (noise is added by the client). These mods clip and perturb returned parameters, so clients return
    weights after one step of SGD on one image, the same in every round. A `Watcher` at the tap attacks each reply.

    Writes rows.jsonl.gz, summary.csv, summary.tex, table.csv and run.json to --out; --resume goes on with an unfinished
    run.
    """

    model: str = "vit_mini_32"
    """A plain ViT."""
    weights: str = "auto"
    """random, timm, auto (shipped weights, else random), long (of a longer training), or a checkpoint's path."""
    images: str = "photos"
    """photos (embedded), a folder of pictures, or a data set's name."""
    data_path: Path | None = None
    """Local copy of the data set named in --images."""
    clients: int = 8
    """Clients, each with one image."""
    rounds: int = 2
    """Rounds; the last one's replies are scored."""
    learning_rate: float = 0.05
    """Of the clients' step."""
    clipping_norm: float = 1.0
    """Of every mod, and the sensitivity that LocalDpMod is given; adaptive clipping starts from it."""
    noise_multiplier: float = 0.01
    """Of the noise on the mean of clipped updates, in units of the norm."""
    epsilons: tuple[float, ...] = (10, 100, 1e3, 1e4, 1e5, 1e6, 1e7)
    """Of LocalDpMod, for one message, at delta 1e-5."""
    attacks: tuple[str, ...] = ("patch_embedding", "noisy_rounds")
    """Attacks on every reply."""
    seed: int = 0
    """Fixes random weights and the noise."""
    out: Path = Path("runs/flower_mods")
    """Folder of rows and tables (the committed ones stand in results/flower_mods)."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        check_positive(self, "clients", "rounds")
        for name in ("learning_rate", "clipping_norm"):
            if not getattr(self, name) > 0:
                raise UsageError(f"--{name.replace('_', '-')} must be positive, not {getattr(self, name)}")
        if self.noise_multiplier < 0 or not all(epsilon > 0 for epsilon in self.epsilons):
            raise UsageError("--noise-multiplier must not be negative, and every one of --epsilons must be positive")
        if not self.attacks:
            raise UsageError(f"--attacks takes names from: {', '.join(ATTACKS)}")
        check_names(ATTACKS, self.attacks)
        super().validate()
