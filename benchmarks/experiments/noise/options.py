"""Options of the table of noise and its bound."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from attacks import ATTACKS, UsageError
from experiments.scaffold import AttackOptions, check_names, check_positive
from fedmjp.config import RunConfig, from_flat
from fedmjp.defenses.chain import read_defense, split_chain
from fedmjp.leaderboard.protocol import slug

NOISES = ("noise", "dp_sgd")


@dataclass(frozen=True)
class Options(AttackOptions):
    """What do attacks that know noise recover from updates of one image, and what does the bound allow?

        python benchmarks/noise.py

    A federation for each of --defenses: clients with one image each send its noised gradient in every round, and the
    server takes steps with it. At each of --updates the last update, or all so far, are attacked. Beside them stands
    the least expected error that the equations of these updates allow (`fedmjp.audit.noise_bound`): of unbiased
    estimates, and of any where pixels are drawn from independent normal distributions of the image's variance. Under
    noise that comes after mjp (mjp:gamma=0.1+noise:...) no bound is known, and none is stated.

    A federation is taken up where it stopped (--resume). Writes rows.jsonl.gz, bounds.csv, table.csv and run.json to
    --out.
    """

    model: str = "vit_mini_32"
    """A ViT with position embedding; mjp trains NAME_mjp."""
    weights: str = "auto"
    """Where every federation starts: random, auto (shipped weights, else random), long, or a checkpoint's path."""
    data: str = "photos"
    """photos (embedded), cifar10, tiny-imagenet, or folder:PATH."""
    data_path: Path | None = None
    """Local copy of the data set."""
    clients: int = 8
    """Clients, each with one image."""
    updates: tuple[int, ...] = (1, 4, 16)
    """Numbers of updates of each client after which it is attacked; the largest is that of the rounds."""
    defenses: tuple[str, ...] = (
        *(f"noise:noise_unit=entry,noise_multiplier={level}" for level in ("1e-4", "1e-3", "1e-2", "1e-1")),
        *(f"dp_sgd:dp_noise_multiplier={level}" for level in ("1e-5", "1e-3")),
        "dp_sgd:dp_epsilon=8",
    )
    """Settings of noise and of dp_sgd, alone or after mjp, as for --defense of fedmjp.simulate."""
    attacks: tuple[str, ...] = ("patch_embedding", "noisy_rounds")
    """Attacks at every number of updates."""
    seed: int = 0
    """Fixes the partition, random weights and the noise."""
    out: Path = Path("runs/noise")
    """Folder of federations and table (the committed table stands in results/noise)."""

    def federation(self, defense: str) -> RunConfig:
        """The run under one defence."""
        rounds = max(self.updates)
        flat = {"model": self.model, "weights": self.weights, "data": self.data, "train_limit": self.clients}
        flat |= {"clients": self.clients, "rounds": rounds, "evaluate_every": rounds, "batch_size": 1}
        flat |= {"audit_rounds": ",".join(map(str, self.updates)), "seed": self.seed, "device": self.device}
        flat |= {"audit_clients": ",".join(map(str, range(self.clients))), "threads": self.threads, "resume": True}
        flat |= {"lpips_net": self.lpips_net, "out": str(self.out / "federations" / slug(defense))}
        flat |= {"data_path": str(self.data_path or ""), "lpips_weights": str(self.lpips_weights or "")}
        config = from_flat(flat)
        return replace(config, defense=(defense,), audit=replace(config.audit, attacks=self.attacks))

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        check_positive(self, "clients", "updates")
        if not self.updates or not self.attacks or not self.defenses:
            raise UsageError("--updates, --attacks and --defenses take at least one value each")
        check_names(ATTACKS, self.attacks)
        for entry in self.defenses:
            names = [name for name, _ in split_chain(entry)]
            if names[-1] not in NOISES or names[:-1] not in ([], ["mjp"]):
                raise UsageError(
                    f"--defenses takes settings of {' and '.join(NOISES)}, alone or after mjp, not {entry!r}"
                )
            read_defense(entry).validate()
            self.federation(entry).validate()
        super().validate()
