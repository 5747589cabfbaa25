"""The `breaching` package's attacks (Geiping et al.) on our Observations, as rows beside ours: a peer, not a part.

The package is handed what an adversary of ours has: the sent model, the gradients of the parameters that images reach,
labels as `attacks.gradient_matching.labels` infers them (the package infers from the last parameter in the list, which
in a model with a localisation map is not the classifier's), and the mask of hidden positions. Its own configurations
apply but for the number of iterations. Updates of one step only.

Nothing of the package is imported before it is needed.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attacks.attention import find_first_attention
from attacks.base import Attack
from attacks.gradient_matching.labels import head_bias, infer_labels
from attacks.gradient_matching.reading import read
from attacks.gradient_matching.simulation import simulate
from attacks.gradient_matching.unrolled import math_attention
from attacks.observation import Capability, Observation, Reconstruction, ThreatModel
from attacks.registry import UsageError
from attacks.tokenizer import find_tokenizer

# The order in which AprilAttacker reads a model's parameters.
APRIL_ORDER = (
    "cls_token",
    "pos_embed",
    "patch_embed.proj.weight",
    "patch_embed.proj.bias",
    "blocks.0.attn.qkv.weight",
)


class ForBreaching(nn.Module):
    """A model as the package calls its own.

    Args:
        model: ours.
        names: the parameters that it is to see, all of them by default.
        forward_kwargs: for every call, such as the mask of hidden positions (1, N).
    """

    def __init__(
        self, model: nn.Module, names: Sequence[str] = (), forward_kwargs: Mapping[str, Tensor] = MappingProxyType({})
    ) -> None:
        super().__init__()
        self.model, self.names, self.forward_kwargs = model, tuple(names), dict(forward_kwargs)

    def forward(self, inputs: Tensor, **_) -> Tensor:
        """Logits of normalised images."""
        return self.model(inputs, **{name: mask.expand(len(inputs), -1) for name, mask in self.forward_kwargs.items()})

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those that it is to see."""
        own = dict(self.model.named_parameters())
        return iter([own[name] for name in self.names] if self.names else own.values())


class Metadata(SimpleNamespace):
    """Read by attribute and by key, as the package does both."""

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


@dataclass(frozen=True)
class Peer:
    """The package's attacker and what it is to attack.

    Attributes:
        attacker: one of `breaching.attacks`.
        payload, shared: server's message and user's answer, in its own form.
        labels: (B,) int64 that it was told, or None where it seeks them.
    """

    attacker: Any
    payload: list[dict[str, Any]]
    shared: list[dict[str, Any]]
    labels: Tensor | None

    def run(self, initial: Tensor | None = None) -> tuple[Tensor, list[float]]:
        """Attack.

        Args:
            initial: normalised images (B, C, H, W) to start from.

        Returns:
            Normalised images (B, C, H, W), and the objective before each iteration.
        """
        start = {} if initial is None else {"initial_data": initial}
        with math_attention(), torch.enable_grad(), contextlib.redirect_stdout(io.StringIO()):
            found, stats = self.attacker.reconstruct(self.payload, self.shared, {}, **start)
        return found["data"].detach(), list(stats.get("Trial_0_Val", []))


def breaching_package() -> Any:
    """The package.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import breaching
    except ImportError as error:
        raise UsageError("this attack runs the `breaching` package: pip install breaching") from error
    return breaching


def peer(observation: Observation, config: str, overrides: Sequence[str] = ()) -> Peer:
    """Set the package up against one update.

    Args:
        config: name of one of its attack configurations, such as "invertinggradients".
        overrides: of that configuration, as hydra writes them.

    Raises:
        UsageError: it is not installed, or the update is not of one step.
    """
    package = breaching_package()
    if observation.local_steps > 1:
        raise UsageError("the breaching package is set up for updates of one step only")
    reading = read(observation)
    with torch.enable_grad():
        simulation, target = simulate(observation, [reading], restarts=1, exact=True)
    grey = torch.zeros(1, *observation.image_shape).to(next(iter(simulation.weights.values())))
    expected = simulation.logits(simulation.weights, grey, None).softmax(dim=1)[0].detach()
    labels = observation.labels
    if labels is None:
        bias = head_bias(observation.gradients, simulation.head)
        labels = infer_labels(bias, expected.to(bias), observation.num_examples)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hydra's, about its own next version
        settings = package.get_attack_config(config, overrides=list(overrides))
    names = APRIL_ORDER if settings.attack_type == "april-analytic" else simulation.names
    hidden = {} if reading.mask is None else {simulation.mask_argument: reading.mask[None]}
    model = ForBreaching(simulation.model.requires_grad_(True), names, hidden)
    metadata = Metadata(
        shape=list(observation.image_shape),
        mean=observation.mean,
        std=observation.std,
        modality="vision",
        task="classification",
        classes=len(expected),
    )
    payload = {"parameters": list(model.parameters()), "buffers": [], "metadata": metadata}
    labels = None if settings.attack_type == "joint-optimization" else labels
    told = {"num_data_points": observation.num_examples, "labels": labels, "local_hyperparams": None}
    gradients = [(observation.gradients if n not in target.values else {n: target.values[n][0]})[n] for n in names]
    setup = {"device": gradients[0].device, "dtype": torch.float}
    attacker = package.attacks.prepare_attack(model, nn.CrossEntropyLoss(), settings, setup)
    return Peer(attacker, [payload], [{"gradients": gradients, "buffers": None, "metadata": told}], labels)


@dataclass(frozen=True, kw_only=True)
class BreachingAttack(Attack):
    """One of the package's attacks on one update.

    Args:
        seed: of its starts and noise.
    """

    seed: int = 0

    config: ClassVar[str]
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MODEL_WEIGHTS})
    reads_every_parameter: ClassVar[bool] = True

    def require(self, threat_model: ThreatModel, name: str) -> None:
        """See `Attack.require`; the package has to be there."""
        breaching_package()
        super().require(threat_model, name)

    def overrides(self) -> list[str]:
        """What differs from the package's configuration."""
        return []

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; `details` holds the first and the least objective."""
        observation = observations[-1]
        flags = read(observation).flags + (("labels_given",) if observation.labels is not None else ())
        opponent = peer(observation, self.config, self.overrides())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            normalised, values = opponent.run()
        images = observation.to_pixels(normalised).float()
        details = {"start_loss": values[0], "loss": min(values), "steps": len(values)} if values else {}
        if values and not values[-1] <= values[0]:
            flags += ("loss_above_start",)
        known = torch.zeros_like(images[:, :1], dtype=torch.bool)
        return Reconstruction(images, known, opponent.labels, flags=flags, details=details)


@dataclass(frozen=True, kw_only=True)
class BreachingOptimisation(BreachingAttack):
    """One that goes step by step.

    Args:
        steps: its iterations.
    """

    steps: int = 300

    def overrides(self) -> list[str]:
        """See `BreachingAttack.overrides`."""
        return [f"optim.max_iterations={self.steps}"]


@dataclass(frozen=True, kw_only=True)
class BreachingInvertingGradients(BreachingOptimisation):
    """The package's invertinggradients.yaml."""

    config: ClassVar[str] = "invertinggradients"


@dataclass(frozen=True, kw_only=True)
class BreachingSeeThroughGradients(BreachingOptimisation):
    """The package's seethroughgradients.yaml; its batch-norm term is idle on a ViT."""

    config: ClassVar[str] = "seethroughgradients"


@dataclass(frozen=True, kw_only=True)
class BreachingDeepLeakage(BreachingOptimisation):
    """The package's deepleakage.yaml, which seeks labels with the images; up to 20 evaluations an iteration."""

    config: ClassVar[str] = "deepleakage"


@dataclass(frozen=True, kw_only=True)
class BreachingApril(BreachingAttack):
    """The package's april_analytic.yaml: the closed form, for a first block without norm and residual."""

    config: ClassVar[str] = "april_analytic"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MODEL_WEIGHTS, Capability.POSITION_GRADIENT})

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`.

        Raises:
            UsageError: the model is not timm's ViT, or the update lacks what the attack reads.
        """
        observation = observations[-1]
        find_first_attention(observation.model, find_tokenizer(observation.model, observation.image_shape).width)
        lacking = [name for name in APRIL_ORDER if name not in observation.gradients]
        if lacking:
            raise UsageError(f"breaching's AprilAttacker reads timm's ViTs; the update has no {lacking[0]}")
        return super().reconstruct(observations)
