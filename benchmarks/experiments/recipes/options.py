"""Options of the table of clients' recipes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from experiments.client_recipes import RECIPES, check_recipes, with_recipe
from experiments.scaffold import AttackOptions, check_positive
from fedmjp.budgets import read_seconds
from fedmjp.config import RunConfig, from_flat


@dataclass(frozen=True)
class Options(AttackOptions):
    """What do augmentation, batches, optimisers and local epochs do to each attack?

    A federation for each recipe of the clients and each defence, from the same trained weights on the same images; the
    server runs the audit's suite on every update. One axis is changed at a time, against one image a step whose
    gradient is sent; `common` is what people train with: batches of 32, AdamW with decay 0.05, crops and flips, two
    local epochs. Attacks are scored against the image that the client fed, after augmentation. Over several images or
    steps, the first step's images are those that count.

    A federation is taken up where it stopped (--resume). Writes rows.jsonl.gz, table.csv and run.json to --out.
    """

    model: str = "vit_mini_64"
    """A plain ViT; defences turn it into the variant that they need."""
    weights: str = "auto"
    """Where every federation starts: random, auto (shipped weights, else random), long, or a checkpoint's path."""
    data: str = "tiny-imagenet"
    """photos (embedded), cifar10, tiny-imagenet, or folder:PATH."""
    data_path: Path | None = None
    """Local copy of the data set."""
    images: int = 512
    """Training images, divided evenly among the clients."""
    clients: int = 8
    """Clients; each needs as many images as the largest batch."""
    rounds: int = 3
    """Rounds of training, all of them audited."""
    defenses: tuple[str, ...] = ("none", "mjp:gamma=0.5")
    """Defences, as for --defense of fedmjp.simulate."""
    recipes: tuple[str, ...] = ()
    """Names of recipes (none given: all)."""
    budget: str = "15s"
    """Time that the suite may plan for each audited update, on one CPU core (60s, 2m)."""
    seed: int = 0
    """Fixes partition, order, augmentation and masks."""
    out: Path = Path("runs/recipes")
    """Folder of federations and table (the committed table stands in results/recipes)."""

    def chosen(self) -> tuple[str, ...]:
        """Names of the recipes that run.

        Raises:
            UsageError: no such recipe.
        """
        check_recipes(self.recipes)
        return self.recipes or tuple(RECIPES)

    def federation(self, recipe: str) -> RunConfig:
        """The run of one recipe under every defence."""
        flat = {"model": self.model, "weights": self.weights, "data": self.data, "train_limit": self.images}
        flat |= {"clients": self.clients, "rounds": self.rounds, "budget": self.budget, "seed": self.seed}
        flat |= {"device": self.device, "threads": self.threads}
        flat |= {"audit_clients": ",".join(map(str, range(self.clients))), "evaluate_every": self.rounds}
        flat |= {"lpips_net": self.lpips_net, "out": str(self.out / "federations" / recipe.replace(" ", "_"))}
        flat |= {"data_path": str(self.data_path or ""), "lpips_weights": str(self.lpips_weights or "")}
        return replace(with_recipe(from_flat(flat | {"resume": True}), recipe), defense=self.defenses)

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        check_positive(self, "images", "clients", "rounds")
        read_seconds(self.budget, "--budget")
        for name in self.chosen():
            self.federation(name).validate()
        super().validate()
