"""What an attack is given, what it may assume, and what it gives back.

An `Observation` is all that an honest-but-curious server has of one update; an attack sees a sequence of them and
nothing else. The originals stay with the auditor. Command lines read the capabilities from here, so torch is imported
only where a number is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from attacks.registry import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn


T = TypeVar("T")

ORDER_GUESSED = "order_guessed"  # see `Reconstruction.flags`
CLASSIFIER_LEFT_OUT = "classifier_left_out"  # see `Reconstruction.flags`
# A gradient below this norm is scaled up for attacks that solve for what its entries have in common
# (`Observation.legible`); an attack that repeats the client's step would compare the round-off of a float32 loss.
NEGLIGIBLE_NORM = 1e-10
SUPERVISED = "supervised"  # cross-entropy of the model's output and the labels


class Capability(StrEnum):
    """One thing the adversary may see or do, beyond the update of a single step."""

    MODEL_WEIGHTS = "model_weights"  # architecture and weights that the client was sent
    POSITION_GRADIENT = "position_gradient"  # the gradient of the position embedding is part of the update
    SEVERAL_ROUNDS = "several_rounds"  # more than one update of the same client
    LABELS = "labels"  # labels of the batches of all local steps are given, not inferred
    TOKEN_GRADIENT = "token_gradient"  # dL/dz a token even where no position embedding sends it (no message holds it)
    MODIFIED_MODEL = "modified_model"  # the server chose the architecture to its advantage
    AUXILIARY_DATA = "auxiliary_data"  # public photographs, to which a prior was fitted
    AGGREGATE_ONLY = "aggregate_only"  # a restriction: the server sees sums over several clients, no single update
    ACTIVE_PARAMETERS = "active_parameters"  # the server chooses the values of the parameters that it sends
    ACTIVE_ARCHITECTURE = (
        "active_architecture"  # the server chooses the layers of the model that it sends, and their values
    )
    CLIENT_SELECTION = "client_selection"  # the server chooses which clients take part in a round
    CLIENT_SEED = "client_seed"  # what the client drew is known: its random numbers follow from a seed in the order


@dataclass(frozen=True)
class ThreatModel:
    """A set of capabilities. The default is the honest-but-curious server of federated learning."""

    grants: frozenset[Capability] = frozenset(
        {Capability.MODEL_WEIGHTS, Capability.POSITION_GRADIENT, Capability.SEVERAL_ROUNDS}
    )

    @classmethod
    def parse(cls, names: Iterable[str]) -> ThreatModel:
        """Build a threat model from capability names.

        Raises:
            UsageError: a name is no capability; the message lists them.
        """
        choices = [c.value for c in Capability]
        for name in names:
            if name not in choices:
                raise UsageError(f"unknown capability {name!r}; choose from: {', '.join(choices)}")
        return cls(frozenset(Capability(name) for name in names))

    def lacks(self, needs: Iterable[Capability]) -> list[str]:
        """The names of the needed capabilities that this threat model does not grant, sorted."""
        return sorted(c.value for c in set(needs) - self.grants)


@dataclass(frozen=True, eq=False)
class Drawn:
    """What a client drew for one update, only where the threat model grants it (`Capability.CLIENT_SEED`).

    Attributes:
        noise: added to the gradients, by parameter name, in their units; empty where none was added.
        order: (B, N) int64, for each place of an image the patch that was moved there, or None.
        more: the defence draws what neither of them undoes.
    """

    noise: Mapping[str, Tensor] = field(default_factory=dict)
    order: Tensor | None = None
    more: bool = False


@dataclass(frozen=True, eq=False)
class Observation:
    """One client's update as the server sees it; two of them are equal only if they are the same object.

    Attributes:
        gradients: by parameter name, float32 as sent. For `kind="weights"` this is (sent - returned) / learning rate,
            the sum of the local steps' gradients when the client runs plain SGD.
        model: the model that the client was sent, with its weights; attacks must not change it.
        num_examples: images of `image_shape` in one local step: of an objective with several views of an image, the
            views of that size.
        image_shape: (C, H, W) of one input.
        mean, std: per-channel normalisation that the client applies to images in [0, 1].
        kind: "gradient" (one FedSGD step) or "weights" (the weights after `local_steps` steps).
        labels: (B,) of the first local step's batch, only where the threat model grants them.
        later_labels: (B * (local_steps - 1),) of the later steps' batches, in their order, likewise; None where they
            are not known.
        objective: what the client minimised; attacks that simulate a client know the supervised one.
        weights_granted: whether the threat model grants the weights of `model`; attacks that have a way without them
            take it where it does not.
        bounds: largest error of each entry, by parameter name, where it is not read from the entries themselves.
        drops_patches: the model did not see every patch of an image (DropPos), so that places without a position
            gradient of their own may be in no equation at all.
        drawn: what the client drew, only where the threat model grants it.
    """

    gradients: Mapping[str, Tensor]
    model: nn.Module
    num_examples: int
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    kind: Literal["gradient", "weights"] = "gradient"
    local_steps: int = 1
    learning_rate: float = 0.0
    round: int = 0
    client: int = 0
    labels: Tensor | None = None
    later_labels: Tensor | None = None
    objective: str = SUPERVISED
    weights_granted: bool = True
    bounds: Mapping[str, Tensor] = field(default_factory=dict)
    drops_patches: bool = False
    drawn: Drawn | None = None
    _derived: dict[tuple[Any, ...], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, function: Callable[..., T], *arguments: Hashable) -> T:
        """function(self, *arguments), computed once for this update: several attacks and checks read the same of it.

        Args:
            function: named at module level, so that it is the same one in every call.
            arguments: beside the update.
        """
        key = (function, *arguments)
        if key not in self._derived:
            self._derived[key] = function(self, *arguments)
        return self._derived[key]

    def gradient_of(self, name: str) -> Tensor:
        """The gradient of the parameter called `name`.

        Raises:
            UsageError: it is not in the update.
        """
        if name not in self.gradients:
            raise UsageError(
                f"the update holds no gradient of {name} (frozen or withheld, or zero everywhere), so there is nothing "
                "to solve with"
            )
        return self.gradients[name]

    def all_labels(self) -> Tensor | None:
        """(B * local_steps,) labels of the batches of all local steps, in their order; None unless all are known."""
        if self.labels is None or self.local_steps == 1:
            return self.labels
        if self.later_labels is None:
            return None
        import torch

        return torch.cat([self.labels, self.later_labels])

    def gradient_norm(self) -> float:
        """Euclidean norm of the whole update, in float64; NaN or infinite where an entry is."""
        return self.once(_gradient_norm)

    def legible(self) -> Observation:
        """The update; a gradient of a norm that is negligible, and not zero, times a power of two: a norm of about 1.

        A saturated model sends such gradients. Their entries have all digits of their type, and what they have in
        common does not depend on their size.
        """
        scaled = self.once(_scaled)
        return self if scaled is None else scaled

    def to_pixels(self, normalised: Tensor) -> Tensor:
        """Map normalised images (B, C, H, W) back to [0, 1], clipped."""
        import torch

        shape = (1, -1, 1, 1)
        mean = torch.tensor(self.mean, dtype=normalised.dtype, device=normalised.device).view(shape)
        std = torch.tensor(self.std, dtype=normalised.dtype, device=normalised.device).view(shape)
        return (normalised * std + mean).clamp(0, 1)


def _gradient_norm(observation: Observation) -> float:
    import torch

    numbers = (g.detach() if g.is_floating_point() else g.double() for g in observation.gradients.values())
    norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in numbers]
    return float(torch.stack(norms).norm()) if norms else 0.0


def _scaled(observation: Observation) -> Observation | None:
    """See `Observation.legible`; None where the update needs no other size.

    Not the update itself, which would hold itself and stay in memory until Python looks for such circles.
    """
    norm = observation.gradient_norm()
    if observation.kind != "gradient" or not 0 < norm < NEGLIGIBLE_NORM:
        return None
    power = -math.frexp(norm)[1]

    def scaled(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Times two to that power, exactly; in two steps, because the power itself may be beyond float32."""
        half = power // 2
        return {name: value * 2.0**half * 2.0 ** (power - half) for name, value in values.items()}

    drawn = None if observation.drawn is None else replace(observation.drawn, noise=scaled(observation.drawn.noise))
    return replace(observation, gradients=scaled(observation.gradients), bounds=scaled(observation.bounds), drawn=drawn)


@dataclass(frozen=True)
class Reconstruction:
    """What an attack gives back.

    Attributes:
        images: (B, C, H, W) float32 in [0, 1], or None where the attack cannot give any; fewer than the batch holds
            where it recovers some of them alone.
        known: (B, 1, H, W) bool, the pixels that the attack vouches for, by its own estimate of its error; all False
            when `diagnosis` says why not.
        certified: the answer reproduces the update to the precision of the message (`attacks.certificate`). Set by the
            auditor: in a federation where the threat model grants the weights, in audits of one's own model always.
        residual: relative difference of the gradients of answer and client; NaN where it was not computed.
        labels: (B,) where the attack inferred them, one an image; of all local steps where it simulates them.
        diagnosis: "" when the attack's assumptions hold, else in words a user can act on why its answer is not to be
            trusted.
        seconds: wall-clock time of the attack.
        details: numbers worth a column elsewhere, such as the condition number of the system solved.
        flags: warnings that an evaluation may be unreliable, in short names: loss_above_start, gradient_near_zero,
            zero_rows_ignored (masked positions taken for visible ones), one_mask_assumed (for all images of a batch),
            labels_given (not inferred), batch_statistics_assumed (the model has batch norms), order_guessed (of patches
            whose order the update does not hold), classifier_left_out (certified by the encoder's gradients alone).
    """

    images: Tensor | None
    known: Tensor | None = None
    labels: Tensor | None = None
    diagnosis: str = ""
    seconds: float = 0.0
    details: Mapping[str, float] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    certified: bool = False
    residual: float = float("nan")
