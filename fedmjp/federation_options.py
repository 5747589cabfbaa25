"""Options of a federation: who trains, what is sent, how a client trains, and what the server does with the mean.

Part of `fedmjp.config`; nothing of torch or Flower is imported here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, Literal

import tyro

from attacks.registry import UsageError
from fedmjp.data.augmentations import AUGMENTATIONS, NO_AUGMENTATION, Augmentation
from fedmjp.data.partitioning import read_alpha
from fedmjp.models.registry import check_drop_rate
from fedmjp.settings import split_entry, with_settings


@dataclass(frozen=True)
class FedAvg:
    """The mean replaces the weights (McMahan et al. 2017, arXiv:1602.05629).

    Attributes:
        flower: name of the class of `flwr.serverapp.strategy` whose optimiser the server uses, "" for none.
        proximal_mu: weight of the clients' proximal term.
    """

    flower: ClassVar[str] = ""
    proximal_mu: ClassVar[float] = 0.0

    def validate(self) -> None:
        """Check the settings.

        Raises:
            UsageError: one that is not a positive number, or a decay rate that does not lie in [0, 1).
        """
        for name in (field.name for field in fields(self)):
            value, share = getattr(self, name), name.startswith("beta") or name == "server_momentum"
            if share and not 0 <= value < 1:
                raise UsageError(f"{name} of --strategy must lie in [0, 1), not {value}")
            if not share and not 0 < value < math.inf:
                raise UsageError(f"{name} of --strategy must be positive, not {value}")


@dataclass(frozen=True)
class FedProx(FedAvg):
    """As FedAvg; each client adds proximal_mu / 2 times the squared distance from the weights it was sent to its loss
    (Li et al. 2020, arXiv:1812.06127, equation 2)."""

    proximal_mu: float = 0.01


@dataclass(frozen=True)
class FedAvgM(FedAvg):
    """Momentum on the mean's step (Hsu et al. 2019, arXiv:1909.06335)."""

    flower: ClassVar[str] = "FedAvgM"
    server_learning_rate: float = 1.0
    server_momentum: float = 0.9


@dataclass(frozen=True)
class FedAdam(FedAvg):
    """Adam on the mean's step (Reddi et al. 2021, arXiv:2003.00295, algorithm 2)."""

    flower: ClassVar[str] = "FedAdam"
    eta: float = 0.01
    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """Yogi on the mean's step (the same paper)."""

    flower: ClassVar[str] = "FedYogi"


@dataclass(frozen=True)
class FedAdagrad(FedAvg):
    """Adagrad on the mean's step (the same paper)."""

    flower: ClassVar[str] = "FedAdagrad"
    eta: float = 0.01
    tau: float = 1e-3


STRATEGIES = {kind.__name__.lower(): kind for kind in (FedAvg, FedProx, FedAvgM, FedAdam, FedYogi, FedAdagrad)}


def _settings_of(kind: type[FedAvg]) -> str:
    named = ", ".join(f"{field.name}={field.default}" for field in fields(kind))
    return f"{kind.__name__.lower()} ({named})" if named else kind.__name__.lower()


STRATEGY_HELP = (
    "What the server does with the clients' mean, NAME or NAME:option=value,option=value; the optimisers are Flower's. "
    f"Choose from: {'; '.join(map(_settings_of, STRATEGIES.values()))}."
)
AUGMENT_HELP = (
    "How clients augment the images of each step: none; flip (left to right); crop+flip (random resized crops of 8 to "
    "100 % of the area); colour (brightness, contrast and saturation by up to 40 %); mixup or cutmix, DeiT's (an even "
    "batch); deit (crop+flip, RandAugment, erasing, Mixup and CutMix; an even batch). Attacks are scored against the "
    "images that the client fed: cropped, recoloured or mixed."
)


@dataclass(frozen=True)
class FederationConfig:
    """Who trains, and what is sent."""

    clients: int = 8
    """Clients in the federation."""
    clients_per_round: int = 0
    """Clients drawn each round (0: all of them)."""
    rounds: int = 3
    """Rounds of training."""
    partition: str = "iid"
    """How the training images are dealt out: iid, or dirichlet:ALPHA (small ALPHA: each client sees few classes)."""
    update: Literal["gradient", "weights"] = "gradient"
    """What a client sends: the gradient of one batch (FedSGD), or its weights after --local-steps steps (FedAvg)."""
    batch_size: int = 1
    """Images in a client's batch. The closed forms invert batches of one."""
    local_steps: int = 1
    """Steps a client takes before it sends (more than 1 needs --update weights)."""
    local_epochs: int = 0
    """Passes over a client's own images before it sends, instead of --local-steps (0: those steps)."""
    learning_rate: float = 0.01
    """Rate of the server's step on the mean gradient, or of the clients' local optimiser."""
    strategy: Annotated[str, tyro.conf.arg(help=STRATEGY_HELP)] = "fedavg"
    evaluate_every: int = 1
    """Rounds between evaluations of the global model on the test images; before the first and after the last round it
    is evaluated anyway."""
    least_share: float = 1.0
    """Share of a round's clients whose updates must arrive whole; with fewer the run stops (1: any client that fails or
    sends something unusable stops it). Those left out are named in the report."""
    refuse_suspicious: bool = False
    """Each client checks the model that it is sent before it trains (docs/detection.md) and sends no update where it
    looks prepared; --least-share says how many may do so before the run stops."""
    round_timeout: float = 3600.0
    """Seconds that a server on a SuperLink waits for a round's clients. One that has not answered by then has failed:
    it stops the run by its name, or is left out under --least-share."""
    engine: Literal["local", "ray"] = "local"
    """local: Flower's apps in this process. ray: Flower's simulation (pip install 'fedmjp[ray]')."""

    def chosen_strategy(self) -> FedAvg:
        """The strategy with its settings.

        Raises:
            UsageError: no such strategy or setting, or a value out of range.
        """
        name, settings = split_entry(self.strategy, "--strategy")
        if name not in STRATEGIES:
            raise UsageError(f"unknown strategy {name!r}; choose from: {', '.join(STRATEGIES)}")
        chosen = with_settings(STRATEGIES[name](), settings, f"strategy {name!r}")
        chosen.validate()
        return chosen

    def steps_of(self, images: int) -> int:
        """Local steps of a client that holds `images` images, at least 1."""
        return math.ceil(self.local_epochs * images / self.batch_size) if self.local_epochs else self.local_steps

    def validate(self) -> None:
        """Check the options.

        Raises:
            UsageError: one line that names the option and its range.
        """
        for option in ("clients", "rounds", "batch_size", "local_steps", "evaluate_every"):
            if getattr(self, option) < 1:
                raise UsageError(f"--{option.replace('_', '-')} must be at least 1, not {getattr(self, option)}")
        if not 0 <= self.clients_per_round <= self.clients:
            raise UsageError(
                f"--clients-per-round must lie between 0 and --clients ({self.clients}), not {self.clients_per_round}"
            )
        if not 0 < self.least_share <= 1:
            raise UsageError(f"--least-share must lie in (0, 1], not {self.least_share}")
        if not 0 < self.round_timeout < math.inf:
            raise UsageError(f"--round-timeout must be positive, not {self.round_timeout}")
        read_alpha(self.partition)
        if not 0 < self.learning_rate < math.inf:
            raise UsageError(f"--learning-rate must be positive, not {self.learning_rate}")
        if self.local_epochs < 0:
            raise UsageError(f"--local-epochs must not be negative, but is {self.local_epochs}")
        if self.local_epochs and self.local_steps > 1:
            raise UsageError("--local-epochs and --local-steps both say how long a client trains; pass one of them")
        if self.update == "gradient" and (self.local_steps > 1 or self.local_epochs):
            flag = "--local-epochs" if self.local_epochs else "--local-steps above 1"
            raise UsageError(f"{flag} needs --update weights: a gradient is of one step")
        if self.chosen_strategy().proximal_mu and self.update == "gradient":
            raise UsageError("--strategy fedprox needs --update weights: its term is zero in a client's first step")


@dataclass(frozen=True)
class LocalConfig:
    """How a client trains."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Optimiser of the local steps (adamw needs --update weights). Its state starts anew in every round."""
    momentum: float = 0.0
    """Momentum of sgd (needs --update weights)."""
    weight_decay: float = 0.0
    """Weight decay of the optimiser, on every parameter (needs --update weights)."""
    augment: Annotated[str, tyro.conf.arg(help=AUGMENT_HELP)] = NO_AUGMENTATION
    drop_path: float = 0.0
    """Largest probability that a block is skipped for an image in training, rising linearly with depth."""
    dropout: float = 0.0
    """Probability that an activation is set to zero in training, on the tokens and after the linear layers of a block
    (queries, keys and values excepted)."""

    def augmentation(self) -> Augmentation | None:
        """What `augment` names, None for none."""
        return AUGMENTATIONS.get(self.augment)

    def words(self) -> str:
        """What differs from plain SGD on the images as they are, in short; "" where nothing does."""
        optimizer = [self.optimizer] if self.optimizer != "sgd" else []
        rates = {"drop path": self.drop_path, "dropout": self.dropout}
        numbers = {"momentum": self.momentum, "weight decay": self.weight_decay} | rates
        named = [f"{name} {value:g}" for name, value in numbers.items() if value]
        return ", ".join([*optimizer, *named, *([self.augment] if self.augmentation() else [])])

    def validate(self, federation: FederationConfig, model: str) -> None:
        """Check the options.

        Raises:
            UsageError: one line that names the option and its range.
        """
        if not 0 <= self.momentum < 1:
            raise UsageError(f"--momentum must lie in [0, 1), not {self.momentum}")
        if not 0 <= self.weight_decay < math.inf:
            raise UsageError(f"--weight-decay must not be negative, but is {self.weight_decay}")
        check_drop_rate("--drop-path", self.drop_path, model)
        check_drop_rate("--dropout", self.dropout, model)
        if self.momentum and self.optimizer != "sgd":
            raise UsageError(f"--momentum is sgd's; leave it out with --optimizer {self.optimizer}")
        local = {"--optimizer adamw": self.optimizer != "sgd", "--momentum": self.momentum}
        used = [flag for flag, value in (local | {"--weight-decay": self.weight_decay}).items() if value]
        if used and federation.update == "gradient":
            raise UsageError(f"{used[0]} needs --update weights: a client that sends a gradient takes no step")
        if self.augment not in (NO_AUGMENTATION, *AUGMENTATIONS):
            choices = ", ".join([NO_AUGMENTATION, *AUGMENTATIONS])
            raise UsageError(f"unknown augmentation --augment {self.augment}; choose from: {choices}")
        chosen = self.augmentation()
        if chosen is not None and chosen.mixes and federation.batch_size % 2:
            raise UsageError(
                f"--augment {self.augment} mixes pairs of images: --batch-size is odd: {federation.batch_size}"
            )
