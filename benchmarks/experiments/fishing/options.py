"""Options of the leakage of large batches to an active server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import tyro

from attacks import ATTACKS
from attacks.registry import UsageError
from experiments.fishing.batches import Labels
from experiments.scaffold import DefendedOptions, check_names, check_positive
from fedmjp.budgets import attack_settings, build_attack

if TYPE_CHECKING:
    from attacks import Attack, ThreatModel

CASES = ("fishing=distinct", "feature_fishing=equal", "feature_fishing=mixed")
GRANTS = ("active_parameters", "model_weights", "position_gradient", "several_rounds")


@dataclass(frozen=True)
class Options(DefendedOptions):
    """What does a server get out of a large batch if it chooses the parameters that it sends?

        python benchmarks/fishing.py                                             small ViT, CIFAR-10 or photographs
        python benchmarks/fishing.py --defense mjp --cases fishing=distinct --batch-sizes 8
        python benchmarks/fishing.py --model deit_s --weights random --rounds 4 --cases fishing=distinct --images DIR

        python benchmarks/fishing.py --cases fishing=distinct --batch-sizes 8 --epochs 2 --optimizer adamw \\
            --learning-rate 0.001 --minibatch 4 --attack-options fishing.local_steps=adamw
        python benchmarks/fishing.py --cases fishing=distinct --batch-sizes 8 --sum-of 8 \\
            --attack-options fishing.single_out=true
        python benchmarks/fishing.py --cases feature_fishing=mixed --batch-sizes 4 --rounds 9 --federation 8 \\
            --clients-per-round 2 --select

    Each client trains one step a round on all of its images, a batch of 8 to 256, and sends the gradient in float32;
    with --epochs it trains that many local epochs and returns its weights. With --sum-of the server sees the sum over
    several clients alone: of all their images as of one batch, or, where the attack singles one out, of its images. In
    every round the server sends it a model whose classifier the attack has set, and reads the update; what it needs to
    know it takes from earlier rounds: it has neither labels nor other images. The weights below the classifier stay the
    same. Labels are the images' own, chosen to be distinct, equal, or as they come.

    Beside it stands the closed form of a server that sends the model as it is (patch_embedding, on one honest update),
    and the guesses without a gradient.

    Writes rows.jsonl.gz, table.csv, rounds.csv, rounds.png, batch.png (embedded photographs) and run.json to --out;
    --resume goes on with an unfinished run, or adds models and cases to a finished one.
    """

    model: str = "vit_mini_32"
    """Plain model; the defence turns it into the variant it needs."""
    weights: str = "auto"
    """random, timm, auto (shipped weights, else random), long (of a longer training), or a checkpoint's path."""
    encoder: Annotated[Path | None, tyro.conf.arg(name="from", metavar="CHECKPOINT")] = None
    """Take the encoder of this checkpoint, with a new classifier of 1000 classes (with --weights random)."""
    image_size: int | None = None
    """Pixels of a side, for a plain ViT, whose position embedding is resampled (None: the model's own)."""
    images: str = "photos"
    """photos (embedded), a folder of pictures, or a data set's name."""
    data_path: Path | None = None
    """Local copy of the data set named in --images."""
    defense: str = "none"
    """The clients' defence."""
    cases: tuple[str, ...] = CASES
    """ATTACK=LABELS: an attack that chooses what is sent, and the labels of a client's images: distinct, equal or
    mixed (as they come)."""
    attack_options: tuple[str, ...] = ()
    """Settings of attacks, as ATTACK.setting=value (fishing.reader=unmix)."""
    batch_sizes: tuple[int, ...] = (8, 32, 64)
    """Images of a client."""
    clients: int = 2
    """Clients (or sums) for each case and batch size, with different images."""
    sum_of: int = 1
    """Clients of whose updates the server sees the sum alone (1: it sees each one)."""
    federation: int = 0
    """Clients of the federation that those attacked are part of, one at a time (0: no more than those)."""
    clients_per_round: int = 0
    """Of the --federation, sampled for each round; a server has nothing of a client in the other rounds (0: all)."""
    select: bool = False
    """The server selects who takes part: the attacked client in every round (capability client_selection)."""
    epochs: int = 0
    """Local epochs of a round (0: one step, whose gradient is sent)."""
    minibatch: int = 0
    """Images of a local step, with --epochs (0: all of the client's)."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Of the local epochs; torch's defaults but for the rate."""
    learning_rate: float = 0.01
    """Of the local epochs."""
    rounds: int = 0
    """Rounds that the server takes at most (0: one more than the client has images)."""
    seed: int = 0
    """Fixes random weights, the choice of images and the defence."""
    out: Path = Path("runs/fishing")
    """Folder of rows, tables and figures (the committed ones stand in results/fishing)."""

    def pairs(self) -> list[tuple[str, Labels]]:
        """(attack, labels) for each entry of `cases`.

        Raises:
            UsageError: an entry is not written so.
        """
        found = []
        for entry in self.cases:
            attack, _, labels = entry.partition("=")
            if labels not in get_args(Labels):
                raise UsageError(f"--cases {entry}: write ATTACK=LABELS with labels {', '.join(get_args(Labels))}")
            found.append((attack, labels))
        return found

    def threat_model(self, attack: Attack | None) -> ThreatModel:
        """What an attack that chooses what is sent is granted; None for a server that sends the model as it is."""
        from attacks import ThreatModel  # imports torch

        return ThreatModel() if attack is None else ThreatModel.parse([*GRANTS, *["client_selection"] * self.select])

    def settings(self) -> dict[str, dict]:
        """The settings given for attacks, by attack."""
        return attack_settings([attack for attack, _ in self.pairs()], (), self.attack_options)

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        check_positive(self, "batch_sizes", "clients", "image_size", "sum_of")
        if min(self.rounds, self.epochs, self.minibatch) < 0 or not self.learning_rate > 0:
            raise UsageError("--rounds, --epochs and --minibatch must not be negative, and --learning-rate be above 0")
        if self.epochs and self.defense != "none":
            raise UsageError("--epochs trains clients without a defence here; run python -m fedmjp.simulate for others")
        if self.encoder is not None and (self.weights != "random" or self.defense != "none"):
            raise UsageError(f"--from {self.encoder} gives the encoder alone: pass --weights random and no defence")
        self._check_sampling()
        check_names(ATTACKS, [attack for attack, _ in self.pairs()])
        self.chosen_defense()
        super().validate()
        for name, _ in self.pairs():
            attack = build_attack(name, self.settings().get(name))
            attack.require(self.threat_model(attack), name)
            if not hasattr(attack, "send"):
                raise UsageError(f"--cases {name}: the attack does not choose what is sent")
            if attack.single_out and self.sum_of == 1:
                raise UsageError(f"{name}.single_out takes a client out of a sum: pass --sum-of NUMBER as well")

    def _check_sampling(self) -> None:
        if not (self.federation or self.clients_per_round or self.select):
            return
        if not 1 <= self.clients_per_round < self.federation or self.clients > self.federation:
            raise UsageError(
                f"--clients-per-round {self.clients_per_round} of --federation {self.federation} is no sample of a "
                f"federation with the --clients {self.clients} that are attacked; --select goes with both as well"
            )
        if self.sum_of > 1:
            raise UsageError("--clients-per-round goes with updates of single clients: leave --sum-of out")

    def takes_part(self, client: int, round: int) -> bool:
        """Whether an attacked client takes part in a round, drawn as in a federation of `fedmjp.simulate`."""
        if not self.federation:
            return True
        from fedmjp.federation.strategy import sample_clients  # imports torch and flwr

        always = (client,) if self.select else ()
        return client in sample_clients(self.federation, self.clients_per_round, self.seed, round, always)

    def circumstances(self, single_out: bool) -> str:
        """What a round is beside one client's gradient of one step, in words that begin with a comma; "" for that."""
        from fedmjp.audit.aggregate import sum_in_words  # imports torch

        optimizer = {"sgd": "SGD", "adamw": "AdamW"}[self.optimizer]
        epochs = f", {self.epochs} local epochs of {optimizer} at {self.learning_rate:g}" if self.epochs else ""
        epochs += f" in steps of {self.minibatch} images" if self.epochs and self.minibatch else ""
        sampled = f", {self.clients_per_round} of {self.federation} clients a round" if self.federation else ""
        sampled += ", the attacked one in all" if self.select else ""
        return epochs + sum_in_words(self.sum_of, single_out) + sampled
