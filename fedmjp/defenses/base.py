"""What a client may do about leakage: hooks on the model it trains, on its input, and on the update it sends.

A new defence is one file: a frozen dataclass whose fields are its options (they appear on the command line), and the
hooks it needs. A line in `fedmjp.defenses.DEFENSES`, or an entry point of another package, makes it known by name.
Defences are stateless; their randomness comes from a generator that is passed to them. Command lines import every
defence for its options: a module that imports torch inside its hooks keeps `--help` fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedmjp.models import BuiltModel


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
        moves_patches: whether the input's patches may stand at other places than in the image.
        hides_positions: whether it works by hiding or withholding the position embedding.
        added: options that came after rows were written; see `parameters`.
    """

    random: ClassVar[bool] = False
    known_by: ClassVar[tuple[str, ...]] = ()
    moves_patches: ClassVar[bool] = False
    hides_positions: ClassVar[bool] = False
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

    def on_input(self, images: Tensor, model: BuiltModel, generator: torch.Generator, round: int) -> ClientInput:
        """Transform a batch (B, C, H, W) in [0, 1]; `round` counts from 1."""
        return ClientInput(images)

    def loss_weights(self) -> Mapping[str, float]:
        """Terms that the client adds to the cross-entropy, by name of the objective, with their weights."""
        return {}

    def on_update(self, update: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Transform the update (parameter name -> tensor) before it is sent."""
        return update

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
