"""What a client may do about leakage: hooks on the model it trains, on its input, on the gradient of a step, and on the
update it sends.

A new defence is one file: a frozen dataclass whose fields are its options (they appear on the command line), and the
hooks it needs. A line in `fedmjp.defenses.DEFENSES`, or an entry point of another package, makes it known by name.
Several act one after the other as a chain (`fedmjp.defenses.chain`). Defences are stateless: what a client remembers
from one update to the next is handed to them and handed back; their randomness comes from a generator that is passed to
them. Command lines import every defence for its options: a module that imports torch inside its hooks keeps `--help`
fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

from attacks.registry import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fedmjp.data.augmentations import Augmentation
    from fedmjp.defenses.privacy import Schedule
    from fedmjp.defenses.step import LocalStep
    from fedmjp.models import BuiltModel
    from fedmjp.objectives import Objective

# Attacks that read the gradients of a model's first layers alone, with and without hidden positions.
FIRST_LAYERS = (
    *("patch_embedding", "token_span", "batch_rounds"),
    *("mjp_subspace", "mjp_mixture", "mjp_rounds", "unmix", "unmix_rounds"),
)


@dataclass(frozen=True)
class ClientInput:
    """What the model of a client sees.

    Attributes:
        images: (B, C, H, W) in [0, 1], after the defence.
        position_mask: (B, N) bool, positions hidden behind the unknown embedding, or None.
        origins: (B, N) int64, where each patch stood before the jigsaw, for models that take it as an input (IDX), or
            None.
        rearrange: moves the pixels of other maps (B, K, H, W) of the same images, such as labels, as those of `images`
            were moved; None if none was.
    """

    images: Tensor
    position_mask: Tensor | None = None
    origins: Tensor | None = None
    rearrange: Callable[[Tensor], Tensor] | None = None

    def forward_kwargs(self) -> dict[str, Tensor]:
        """Keyword arguments of the model's forward pass, in addition to the images: those of the two that are set."""
        known = {"position_mask": self.position_mask, "origins": self.origins}
        return {name: value for name, value in known.items() if value is not None}


@dataclass(frozen=True)
class Defense:
    """Base class, and no defence by itself: every hook returns its input unchanged.

    Attributes:
        random: whether the update depends on random numbers of the defence.
        known_by: registered attacks that take the defence into account. A verdict without one of them says so.
        known_beside_others: those that do so in a chain, and without another defence have nothing to work on.
        moves_patches: whether the input's patches may stand at other places than in the image.
        hides_positions: whether it works by hiding or withholding the position embedding.
        remembers: whether a client keeps something between updates (`send`).
        added: options that came after rows were written; see `parameters`.
    """

    random: ClassVar[bool] = False
    known_by: ClassVar[tuple[str, ...]] = ()
    known_beside_others: ClassVar[tuple[str, ...]] = ()
    moves_patches: ClassVar[bool] = False
    hides_positions: ClassVar[bool] = False
    remembers: ClassVar[bool] = False
    added: ClassVar[tuple[str, ...]] = ()

    def parameters(self) -> dict[str, Any]:
        """The options as rows hold them: without those of `added` at their default.

        Rows from before such an option stay rows of the same case.
        """
        options = {option.name: (getattr(self, option.name), option.default) for option in fields(self)}
        return {name: value for name, (value, usual) in options.items() if name not in self.added or value != usual}

    def model_name(self, name: str) -> str:
        """The variant of model `name` that the clients train under this defence."""
        return name

    def adapt(self, module: nn.Module) -> None:
        """Change a model whose weights are loaded, for clients and server alike; torch's seed is set to the run's."""

    def freezes(self, name: str) -> bool:
        """Whether the client leaves the parameter of that name as it is, and sends zeros for it."""
        return False

    def on_input(self, images: Tensor, model: BuiltModel, generator: torch.Generator, round: int) -> ClientInput:
        """Transform a batch (B, C, H, W) in [0, 1]; `round` counts from 1."""
        return ClientInput(images)

    def loss_weights(self) -> Mapping[str, float]:
        """Terms that the client adds to the cross-entropy, by name of the objective, with their weights."""
        return {}

    def gradients(self, step: LocalStep, generator: torch.Generator) -> dict[str, Tensor]:
        """The gradient of one local step by name of the parameter: that of the mean loss, if nothing else is done."""
        return step.gradients()

    def on_update(self, update: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Transform the update (parameter name -> tensor) before it is sent."""
        return update

    def known_noise(self, sent: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """The noise that `on_update` added to what was sent, for a server that can draw it again; empty without any.

        Args:
            sent: parameter name -> tensor of the parameters that are trained, in the model's order.
            generator: as `on_update` got it.
        """
        return {}

    def known_noise_of_step(
        self, trained: Mapping[str, Tensor], images: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """The noise that `gradients` added in one step, for a server that can draw it again; empty without any.

        Args:
            trained: parameter name -> tensor of its shape, of the parameters that are trained, in the model's order.
            images: in the step.
            generator: as `gradients` got it.
        """
        return {}

    def send(
        self, update: dict[str, Tensor], generator: torch.Generator, memory: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What the client sends of an update, and what it remembers for its next one.

        Args:
            update: parameter name -> tensor.
            generator: of the defence's random numbers.
            memory: what the same client remembered after its last update, by name; empty before its first.
        """
        return self.on_update(update, generator), {}

    def message(
        self, update: dict[str, Tensor], generator: torch.Generator, memory: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What `send` makes of the parameters that are trained, with zeros for the frozen ones; clients call this.

        Raises:
            UsageError: the defence sends other names or shapes than it was given, which no server can average.
        """
        import torch

        own = {name: tensor for name, tensor in update.items() if not self.freezes(name)}
        sent, remembered = self.send(own, generator, memory)
        shapes = ({n: tuple(t.shape) for n, t in tensors.items()} for tensors in (own, sent))
        self._require_same(*shapes)
        return {n: sent[n] if n in own else torch.zeros_like(t) for n, t in update.items()}, remembered

    def _require_same(self, given: Mapping[str, tuple[int, ...]], sent: Mapping[str, tuple[int, ...]]) -> None:
        changed = [name for name in {**given, **sent} if given.get(name) != sent.get(name)]
        if changed:
            name = changed[0]
            raise UsageError(
                f"the defence {type(self).__name__} must send the names and shapes that it is given: {name} is "
                f"{given.get(name, 'not among them')}, and what it sends is {sent.get(name, 'without it')}"
            )

    @property
    def acts_on_update(self) -> bool:
        """Whether the update is another one than that of an undefended client with the same model and input."""
        return type(self).freezes is not Defense.freezes or self.changes_values

    @property
    def changes_values(self) -> bool:
        """Whether what is sent of the trained parameters is another gradient than that of the mean loss."""
        hooks = ("gradients", "on_update", "send")
        return any(getattr(type(self), hook) is not getattr(Defense, hook) for hook in hooks)

    @property
    def adapts(self) -> bool:
        """Whether the clients' model has other layers than those of its name (`adapt`)."""
        return type(self).adapt is not Defense.adapt

    def bits(self, sent: Mapping[str, Tensor]) -> int:
        """Size of a message that holds the update `sent`, in bits, without the frame that carries it."""
        return 32 * sum(tensor.numel() for name, tensor in sent.items() if not self.freezes(name))

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""

    def check(self, objective: Objective, augmentation: Augmentation | None) -> None:
        """Raise `UsageError` where the defence does not go with what is trained, or with how images are augmented."""

    def scheduled(self, schedule: Schedule) -> Self:
        """The defence with what follows from how often a training uses each image.

        Raises:
            UsageError: what the options ask for cannot be had in such a training.
        """
        return self

    def guarantee(self, schedule: Schedule) -> str:
        """What the defence proves for a training, with its assumptions, in words; "" where it proves nothing."""
        return ""


def refuse_batch_norms(module: nn.Module, reason: str) -> None:
    """Raise `UsageError` with the reason for a model with batch norms."""
    from torch.nn.modules.batchnorm import _BatchNorm

    if any(isinstance(part, _BatchNorm) for part in module.modules()):
        raise UsageError(reason)
