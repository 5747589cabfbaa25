"""Options of the detection of active servers, and the federations that it trains; needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from attacks.registry import UsageError
from experiments.scaffold import RowOptions, check_positive
from fedmjp.config import DataConfig, EncoderConfig, FederationConfig, LocalConfig, ModelConfig, RunConfig

Start = Literal["scratch", "encoder", "trained"]
CALIBRATION, EVALUATION = "calibration", "evaluation"
# Attacks of a server that knows the detector have this one's strengths; the least change first.
ADAPTIVE = "fishing"
# (attack, settings, place of the client that checks in a sum's group) besides the registered attacks as they are: what
# fishing sends for several local steps, and what it sends those from whose sum it singles one out.
VARIANTS = (
    ("fishing", {"local_steps": "sgd"}, 0),
    ("fishing", {"local_steps": "adamw"}, 0),
    ("fishing", {"single_out": True}, 1),
)


@dataclass(frozen=True)
class Federation:
    """One training of honest clients.

    Attributes:
        start: what it starts from: scratch (random weights), encoder (trained, with a new classifier) or trained.
        purpose: calibration (of the thresholds) or evaluation.
        config: its options.
    """

    start: Start
    purpose: str
    config: RunConfig


@dataclass(frozen=True)
class Options(RowOptions):
    """Does a client that looks at the model it is sent notice an active server?

        python benchmarks/detect.py --data cifar10
        python benchmarks/detect.py --model vit_mini_64 --data tiny-imagenet --starts trained --resume

    Federations of honest clients are trained, from random weights and from trained ones, iid and Dirichlet, with FedSGD
    and with local steps of AdamW. Before each of their local trainings every client checks what it was sent
    (`fedmjp.detect`), its own batch included. The federations of one seed calibrate the thresholds; those of another
    one count false alarms.

    In some rounds of the latter some clients also check what each registered attack of an active server would send
    them instead, in two prepared rounds that follow each other; the training goes on as if nothing had happened. So
    they do what fishing sends for several local steps, and what it sends the clients from whose sum it singles another
    one out. The same, with clients that send gradients, for `fishing` that changes less (fishing.strength) and is given
    a class that the batch holds. What the attacks recover of the batch stands in the same rows.

    Writes rows.jsonl.gz, thresholds.csv, table.csv, curve.csv, roc.png, curve.png and run.json to --out; --resume goes
    on with an unfinished run, or adds data and starts to a finished one.
    """

    model: str = "vit_mini_32"
    """A model with shipped weights."""
    data: str = "cifar10"
    """Name of the data set."""
    data_path: Path | None = None
    """Local copy of it."""
    starts: tuple[str, ...] = ("scratch", "trained")
    """scratch, trained (the shipped weights), encoder (their encoder, with a new classifier)."""
    partitions: tuple[str, ...] = ("iid", "dirichlet:0.3")
    """How the images are dealt out."""
    defense: str = "none"
    """How clients train: none, or one that trains added layers alone (adapters, lora)."""
    updates: tuple[str, ...] = ("gradient", "weights")
    """What clients send: the gradient of a batch, or weights after --local-steps steps of AdamW."""
    clients: int = 2
    """Clients of a federation."""
    rounds: int = 9
    """Rounds of a federation."""
    batch_size: int = 8
    """Images in a client's batch."""
    local_steps: int = 2
    """Of clients that send weights."""
    rates: tuple[float, float] = (0.05, 0.0005)
    """Learning rates: of the server's step on gradients, and of AdamW."""
    train_limit: int = 2000
    """Training images of a federation."""
    attacked_rounds: tuple[int, ...] = (1, 5)
    """Rounds of the evaluation in which attacks are checked."""
    attacked_clients: int = 1
    """Clients, the first ones, that check attacks."""
    strengths: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5, 0.9, 0.99, 0.999, 0.9999)
    """Strengths of the fishing that knows the detector."""
    seeds: tuple[int, int] = (0, 1)
    """Of the calibration's federations and of the evaluation's."""
    out: Path = Path("runs/detect")
    """Folder of rows, tables and figures (the committed ones stand in results/detect)."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        check_positive(self, "clients", "rounds", "batch_size", "local_steps", "train_limit", "attacked_rounds")
        strange = [start for start in self.starts if start not in get_args(Start)]
        if strange:
            raise UsageError(f"--starts {strange[0]}: choose from {', '.join(get_args(Start))}")
        if self.seeds[0] == self.seeds[1]:
            raise UsageError("--seeds takes two different ones: thresholds are not judged by what calibrated them")
        if not all(0 < strength < 1 for strength in self.strengths):
            raise UsageError("--strengths takes numbers in (0, 1)")
        for federation in self.federations():
            federation.config.validate()
        super().validate()

    def federations(self) -> Iterator[Federation]:
        """All federations, those that calibrate first."""
        for purpose, seed in zip((CALIBRATION, EVALUATION), self.seeds, strict=True):
            for start in self.starts:
                for partition in self.partitions:
                    for update in self.updates:
                        yield Federation(start, purpose, self._config(start, partition, update, seed))

    def _config(self, start: str, partition: str, update: str, seed: int) -> RunConfig:
        """The options of one federation."""
        local = update == "weights"
        return RunConfig(
            defense=(self.defense,),
            federation=FederationConfig(
                clients=self.clients,
                rounds=self.rounds,
                partition=partition,
                update=update,
                batch_size=self.batch_size,
                local_steps=self.local_steps if local else 1,
                learning_rate=self.rates[local],
            ),
            local=LocalConfig(optimizer="adamw" if local else "sgd"),
            model=ModelConfig(self.model, "auto" if start == "trained" else "random"),
            start=EncoderConfig(_shipped(self.model) if start == "encoder" else None),
            data=DataConfig(self.data, self.data_path, train_limit=self.train_limit),
            device=self.device,
            threads=self.threads,
            seed=seed,
        )


def _shipped(model: str) -> Path:
    """The shipped checkpoint of a model."""
    from fedmjp.models.weights import SHIPPED

    return SHIPPED / f"{model}.safetensors"
