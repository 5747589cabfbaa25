"""One client's local training in one round: data, model and defence, without Flower.

The auditor of a simulation uses the same object to look up the original images of an attacked update: batches,
augmentation and masks depend only on (the clients' key, client, round, step; `fedmjp.entropy`), so the client sends
nothing but the update itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from attacks.active.architecture import change_layers
from attacks.registry import UsageError
from fedmjp.config import DataConfig, RunConfig
from fedmjp.data import DataBundle, load_data, partition
from fedmjp.defenses import ClientInput
from fedmjp.defenses.privacy import Schedule
from fedmjp.defenses.step import LocalStep
from fedmjp.devices import usable_device, use_threads
from fedmjp.entropy import ClientEntropy
from fedmjp.models.vit import drop_activations, skip_blocks
from fedmjp.objectives import Draws, Learner
from fedmjp.settings import split_entry

MEMORY = "defense/"  # begins the names of what a defence remembers in `ClientResult.kept`


@dataclass(frozen=True)
class Batch:
    """The batch of one local step as the client feeds it, before the defence.

    Attributes:
        images: (B, C, H, W) in [0, 1] but for erased pixels; augmented if the client augments.
        labels: (B,) int64, of the images before augmentation.
        ids: one per image.
        targets: what the loss reads: `labels`, or (B, classes) probabilities where images are mixed or labels smoothed.
    """

    images: Tensor
    labels: Tensor
    ids: tuple[str, ...]
    targets: Tensor


@dataclass(frozen=True)
class ClientResult:
    """The update that a client sends.

    Attributes:
        tensors: gradients, or weights, by parameter name.
        buffers: floating-point buffers by name.
        num_examples: images used in all local steps together.
        loss: mean training loss over the local steps.
        kept: what the client needs for its next update and does not send: the state of what the objective keeps there
            (`Objective.local`), and what the defence remembers, under names that begin with `MEMORY`.
    """

    tensors: dict[str, Tensor]
    buffers: dict[str, Tensor]
    num_examples: int
    loss: float
    kept: dict[str, Tensor] = field(default_factory=dict)


@lru_cache(maxsize=2)
def shared_data(data: DataConfig, size: int, seed: int) -> DataBundle:
    """The data of a run, cached per process for all runs that use the same data.

    Args:
        data: which data, and how many images.
        size: side of the images in pixels.
        seed: see `load_data`.

    Raises:
        UsageError: see `load_data`.
    """
    return load_data(
        data.data,
        size=size,
        path=data.data_path,
        train_limit=data.train_limit,
        test_limit=data.test_limit,
        seed=seed,
    )


@lru_cache(maxsize=3)
def shared_task(order: str, defense: str, entropy: ClientEntropy, layers: str = "") -> ClientTask:
    """The task of a run under one defence, cached per process.

    Args:
        order: the configuration, from `RunConfig.order`.
        defense: name of the defence.
        entropy: what the clients draw from.
        layers: see `ClientTask`.

    Raises:
        UsageError: see `ClientTask`.
    """
    return ClientTask(RunConfig.from_json(order), defense, layers, entropy)


class ClientTask:
    """Model, data partitions and defence of one federation.

    Args:
        config: the configuration of the run.
        defense: name of the defence that this federation trains under.
        layers: what an active server has changed of the model's architecture, as `change_layers` reads it.
        entropy: what the clients draw from; None for that of a simulation of `config`.

    Raises:
        UsageError: data, weights or device are not available, or a client has fewer images than a batch holds.
    """

    def __init__(self, config: RunConfig, defense: str, layers: str = "", entropy: ClientEntropy | None = None) -> None:
        self.config = config
        self.entropy = config.client_entropy() if entropy is None else entropy
        self.defense = config.defence(defense)
        self.device = usable_device(config.device)
        use_threads(config.threads)
        self.data = shared_data(config.data, config.model.side(), config.seed)
        self.parts = partition(
            self.data.train.labels, config.federation.clients, config.federation.partition, config.seed
        )
        smallest = min(range(len(self.parts)), key=lambda client: len(self.parts[client]))
        if len(self.parts[smallest]) < config.federation.batch_size:
            raise UsageError(
                f"--batch-size {config.federation.batch_size} exceeds the {len(self.parts[smallest])} images of client "
                f"{smallest}: pass a smaller batch, fewer clients or more images"
            )
        objective = config.chosen_objective()
        if objective.needs_labels:
            self.data.require_labels(f"--objective {config.objective}")
        self.defense = self.defense.scheduled(self.privacy_schedule)
        self.learner = Learner.build(
            objective,
            self.defense,
            config.model,
            num_classes=len(self.data.classes),
            seed=config.seed,
            device=self.device,
            encoder=config.start.checkpoint,
        )
        self.model = self.learner.model
        change_layers(self.model.module, (3, self.model.image_size, self.model.image_size), layers)
        if config.local.drop_path:
            skip_blocks(self.model.module, config.local.drop_path)
        if config.local.dropout:
            drop_activations(self.model.module, config.local.dropout)
        self.augmented = None
        if (augmentation := config.local.augmentation()) is not None:
            from fedmjp.data.augmentation import AugmentedBatches

            self.augmented = AugmentedBatches(self.data.train, augmentation, self.model.mean, self.model.std)
        self.parameters = dict(self.model.module.named_parameters())
        self.buffers = float_buffers(self.model.module)
        self._loaded: object = None

    @property
    def objective_name(self) -> str:
        """Name of the objective, without its options."""
        return split_entry(self.config.objective, "--objective")[0]

    @property
    def setting(self) -> str:
        """What rows say of the federation: partition, recipe, and what attacks are scored against."""
        f, recipe = self.config.federation, self.config.local.words()
        strategy = [] if f.strategy == "fedavg" else [f.strategy]
        fed = "the original" if self.augmented is None else "the image that the client fed"
        fed = fed if self.learner.objective.whole_views == 1 else "the crops fed"
        return ", ".join(["federation", f.partition, *strategy, *([recipe] if recipe else []), f"scored against {fed}"])

    @property
    def privacy_schedule(self) -> Schedule:
        """How often the training uses each image, if every client takes part in every round."""
        f = self.config.federation
        own = [Schedule.of_epochs(n, f.batch_size, f.rounds * f.steps_of(n)) for n in map(len, self.parts)]
        steps, uses = (max(getattr(one, name) for one in own) for name in ("steps", "uses"))
        return Schedule(min(one.images for one in own), f.batch_size, steps, uses)

    @cached_property
    def guarantee(self) -> str:
        """What the defence proves for this training, "" for nothing (`Defense.guarantee`)."""
        return self.defense.guarantee(self.privacy_schedule)

    def steps(self, client: int) -> int:
        """Local steps of a client in a round."""
        return self.config.federation.steps_of(len(self.parts[client]))

    def batch(self, client: int, round: int, step: int) -> Batch:
        """The batch of one step; `round` counts from 1, `step` from 0."""
        indices, train = self.indices(client, round, step), self.data.train
        labels, ids = train.labels[indices], tuple(train.ids[i] for i in indices)
        if self.augmented is None:
            return Batch(train.images(indices), labels, ids, labels)
        images, targets = self.augmented.draw(indices, self.entropy.seed(6, client, round, step))
        return Batch(images, labels, ids, targets if self.augmented.softens else labels)

    def batch_ids(self, client: int, round: int, step: int) -> tuple[str, ...]:
        """The ids of the batch of one step, without decoding its images."""
        return tuple(self.data.train.ids[i] for i in self.indices(client, round, step))

    def message_generator(self, client: int, round: int) -> torch.Generator:
        """What the defence draws from when it makes the message of a round."""
        return self.entropy.generator(3, client, round, 0)

    def step_generator(self, client: int, round: int, step: int) -> torch.Generator:
        """What the defence draws from when it computes the gradient of one local step."""
        return self.entropy.generator(8, client, round, step)

    def indices(self, client: int, round: int, step: int) -> list[int]:
        """Indices of one step's images in the training set: epochs over the client's data, each in a new order."""
        f = self.config.federation
        own = self.parts[client]
        first = ((round - 1) * f.steps_of(len(own)) + step) * f.batch_size
        places = range(first, first + f.batch_size)
        orders: dict[int, np.ndarray] = {}
        for epoch in {p // len(own) for p in places}:
            orders[epoch] = self.entropy.permutation(len(own), 1, client, epoch)
        return [int(own[orders[p // len(own)][p % len(own)]]) for p in places]

    def seen(self, batch: Batch, client: int, round: int, step: int) -> ClientInput:
        """The batch as the model sees it, after the defence on the input, on the run's device.

        Of an objective with several views, the first.
        """
        return self._views(batch, self._draws(client, round, step), round)[0]

    def whole_views(self, batch: Batch, client: int, round: int, step: int) -> Tensor:
        """The views of the images' own size as the model sees them, (B * whole_views, C, H, W), view by view."""
        views = self._views(batch, self._draws(client, round, step), round)
        return torch.cat([view.images for view in views[: self.learner.objective.whole_views]])

    def _views(self, batch: Batch, draws: Draws, round: int) -> tuple[ClientInput, ...]:
        return self.learner.views(batch.images.to(self.device), draws, round)

    def _draws(self, client: int, round: int, step: int) -> Draws:
        return Draws(*(self.entropy.generator(purpose, client, round, step) for purpose in (2, 5)))

    def _progress(self, round: int, step: int, steps: int) -> float:
        """Share of the run's steps that come before this one of `steps` in its round, in [0, 1)."""
        return ((round - 1) * steps + step) / (self.config.federation.rounds * steps)

    def update(
        self,
        client: int,
        round: int,
        weights: Mapping[str, Tensor],
        source: bytes | None = None,
        kept: Mapping[str, Tensor] | None = None,
    ) -> ClientResult:
        """Train from `weights` and return the update that the client sends.

        Args:
            client: the client's number, from 0.
            round: number of the round, from 1.
            weights: parameters and float buffers by name.
            source: the bytes that hold the weights, if any; see `load`.
            kept: `ClientResult.kept` of this client's last round, or what the server sent (`Objective.kept_by`);
                without it, what the objective keeps starts from the received weights.

        Raises:
            UsageError: the weights do not fit the model.
        """
        self.load(weights, source)
        memory = {n.removeprefix(MEMORY): t for n, t in (kept or {}).items() if n.startswith(MEMORY)}
        kept = {n: t for n, t in (kept or {}).items() if not n.startswith(MEMORY)}
        self.learner.begin(kept)
        own = self.learner.objective.kept_by == "client"
        if own and kept and self.config.federation.update == "gradient":
            self.learner.after_step(self._progress(round, 0, 1))  # the server has taken the step
        if not all(part.training for part in self.model.module.modules()):  # setting the mode takes four times as long
            self.model.module.train()
        steps, descends = self.steps(client), self.config.federation.update == "weights"
        optimizer = self._optimizer() if descends else None
        losses, gradients = [], {}
        for step in range(steps):
            progress = self._progress(round, step, steps)
            gradients, loss = self._gradients(client, round, step)
            losses.append(loss)
            if optimizer is not None:
                self._descend(optimizer, gradients, weights)
                if own:
                    self.learner.after_step(progress)
        sent = gradients
        if descends:
            sent = {n: weights[n].to(self.device) - p.detach() for n, p in self.parameters.items()}
        sent, memory = self.defense.message(sent, self.message_generator(client, round), memory)
        if descends:
            sent = {n: weights[n].to(self.device) - t for n, t in sent.items()}
        examples, mean = self.config.federation.batch_size * steps, sum(losses) / len(losses)
        kept = (self.learner.kept() if own else {}) | {MEMORY + name: tensor for name, tensor in memory.items()}
        return ClientResult(sent, self.buffers, examples, mean, kept)

    def keep(self, weights: Mapping[str, Tensor], kept: Mapping[str, Tensor], round: int) -> dict[str, Tensor]:
        """What the server keeps for all clients (`Objective.kept_by`), updated after a round.

        Args:
            weights: the new global parameters and float buffers by name.
            kept: what it kept before.
            round: number of the round, from 1.
        """
        self.load(weights)
        self.learner.begin(kept)
        self.learner.after_step(self._progress(round, 0, 1))
        return self.learner.kept()

    @property
    def clients_keep(self) -> bool:
        """Whether each client keeps something that a later round needs and no message holds."""
        return self.defense.remembers or self.learner.local is not None and self.learner.objective.kept_by == "client"

    def load(self, weights: Mapping[str, Tensor], source: bytes | None = None) -> None:
        """Copy parameters and buffers by name into the model.

        Args:
            weights: name -> tensor.
            source: the immutable bytes that `weights` are views of. All clients of a round receive the same bytes, so
                in one process parameters that are loaded already are not copied again. Buffers are, because a step
                changes them.

        Raises:
            UsageError: a name or shape does not occur in the model.
        """
        known = self.parameters | self.buffers
        for name, value in weights.items():
            if name not in known or known[name].shape != value.shape:
                raise UsageError(f"the weights received do not fit {self.model.name}: {name} {tuple(value.shape)}")
        fresh = self.buffers if source is not None and source is self._loaded else known
        with torch.no_grad():
            for name in fresh:
                known[name].copy_(weights[name])
        self._loaded = source

    def evaluate(self, weights: Mapping[str, Tensor]) -> tuple[float, float]:
        """(mean loss, accuracy in [0, 1]) of `weights` on the test images, without defence: `Objective.evaluate`."""
        self.load(weights)
        learner = self.learner
        return learner.objective.evaluate(learner.model, learner.local, self.data, self.device)

    def local_step(self, client: int, round: int, step: int) -> LocalStep:
        """One local step of a client, at the weights that are loaded; `round` counts from 1, `step` from 0."""
        batch, draws = self.batch(client, round, step), self._draws(client, round, step)
        labels = batch.targets.to(self.device) if self.data.labelled else None
        progress = self._progress(round, step, self.steps(client))
        return self.learner.step(self._views(batch, draws, round), labels, draws, progress)

    def _gradients(self, client: int, round: int, step: int) -> tuple[dict[str, Tensor], float]:
        """Gradient of every parameter by name in one step, as the defence has it, and the step's mean loss.

        What the model draws itself (blocks that are skipped, dropout, a bottleneck's sample) has a seed of its own.
        """
        local = self.local_step(client, round, step)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            self.entropy.seed_globally(7, client, round, step, device=self.device.type)
            return self._defended(local, client, round, step)

    def _defended(self, local: LocalStep, client: int, round: int, step: int) -> tuple[dict[str, Tensor], float]:
        gradients = self.defense.gradients(local, self.step_generator(client, round, step))
        return gradients, float(local.loss.detach())

    def _optimizer(self) -> torch.optim.Optimizer:
        """A new optimiser of the local steps, with the rate of the federation."""
        local, rate = self.config.local, self.config.federation.learning_rate
        parameters = [p for n, p in self.parameters.items() if not self.defense.freezes(n)]
        if local.optimizer == "adamw":
            return torch.optim.AdamW(parameters, rate, weight_decay=local.weight_decay)
        return torch.optim.SGD(parameters, rate, momentum=local.momentum, weight_decay=local.weight_decay)

    def _descend(
        self, optimizer: torch.optim.Optimizer, gradients: Mapping[str, Tensor], sent: Mapping[str, Tensor]
    ) -> None:
        """One local step, with the proximal term of the strategy (`FedProx`)."""
        self._loaded = None
        mu = self.config.federation.chosen_strategy().proximal_mu
        for name, parameter in self.parameters.items():
            pull = mu * (parameter.detach() - sent[name].to(parameter)) if mu else 0.0
            parameter.grad = gradients[name] + pull
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def float_buffers(module: torch.nn.Module) -> dict[str, Tensor]:
    """Floating-point buffers that belong to a checkpoint (running statistics of batch norms), by name.

    They are averaged like weights. Buffers that a model computes from its architecture (Swin's attention masks) are
    left out.
    """
    kept = module.state_dict().keys()
    return {n: b.detach() for n, b in module.named_buffers() if b.is_floating_point() and n in kept}
