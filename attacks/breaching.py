"""Adapter for the `breaching` package (Geiping et al.): its attacks on our Observations, for comparison with ours.

The package receives the same information as our attacks: the sent model, the gradients of the parameters that the
images influence, the mask of hidden positions, and labels as `attacks.gradient_matching.labels` infers them (the
package infers them from the last parameter in the list, which is not the classifier's in a model with a localisation
map). Its own configurations apply, except for the number of iterations. Only updates of one local step are supported.

The package is imported only when one of these attacks is used.
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
from attacks.gradient_matching.matched_update import extract_matched_update
from attacks.gradient_matching.simulation import build_simulation
from attacks.gradient_matching.unrolled import math_attention
from attacks.observation import Capability, Observation, Reconstruction, ThreatModel
from attacks.registry import UsageError
from attacks.tokenizer import find_tokenizer, logits_of

# The order in which AprilAttacker expects a model's parameters.
APRIL_ORDER = (
    "cls_token",
    "pos_embed",
    "patch_embed.proj.weight",
    "patch_embed.proj.bias",
    "blocks.0.attn.qkv.weight",
)


class ForBreaching(nn.Module):
    """Wraps a model in the interface that the package expects.

    Args:
        model: the model that the client was sent.
        names: the parameters to show to the package, all of them by default.
        forward_kwargs: keyword arguments of every forward pass, such as the mask of positions (1, N).
    """

    def __init__(
        self, model: nn.Module, names: Sequence[str] = (), forward_kwargs: Mapping[str, Tensor] = MappingProxyType({})
    ) -> None:
        super().__init__()
        self.model, self.names, self.forward_kwargs = model, tuple(names), dict(forward_kwargs)

    def forward(self, inputs: Tensor, **_) -> Tensor:
        """Logits (B, K) of normalised images (B, C, H, W)."""
        masks = {name: mask.expand(len(inputs), -1) for name, mask in self.forward_kwargs.items()}
        return logits_of(self.model(inputs, **masks))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters shown to the package."""
        own = dict(self.model.named_parameters())
        return iter([own[name] for name in self.names] if self.names else own.values())


class Metadata(SimpleNamespace):
    """A namespace that can also be read by key; the package reads it in both ways."""

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


@dataclass(frozen=True)
class PreparedAttack:
    """An attack of the package, ready to run on one update.

    Attributes:
        attacker: an attacker of `breaching.attacks`.
        payload, shared: the server's message and the client's update, in the package's format.
        labels: (B,) int64 labels passed to the attacker, or None if it optimises them.
    """

    attacker: Any
    payload: list[dict[str, Any]]
    shared: list[dict[str, Any]]
    labels: Tensor | None

    def run(self, initial: Tensor | None = None) -> tuple[Tensor, list[float]]:
        """Run the attack.

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
    """Import the package.

    Raises:
        UsageError: it is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it uses what torch calls deprecated
            import breaching
    except ImportError as error:
        raise UsageError("this attack runs the `breaching` package: pip install breaching") from error
    return breaching


def prepare_attack(observation: Observation, config: str, overrides: Sequence[str] = ()) -> PreparedAttack:
    """Prepare an attack of the package on one update.

    Args:
        observation: the update, of one local step.
        config: name of one of the package's attack configurations, such as "invertinggradients".
        overrides: changes to that configuration, in hydra's syntax.

    Raises:
        UsageError: the package is not installed, or the update has more than one local step.
    """
    package = breaching_package()
    if observation.local_steps > 1:
        raise UsageError("the breaching package is set up for updates of one step only")
    update = extract_matched_update(observation)
    with torch.enable_grad():
        simulation, target = build_simulation(observation, [update], restarts=1, exact=True)
    grey = torch.zeros(1, *observation.image_shape).to(next(iter(simulation.weights.values())))
    expected = simulation.logits(simulation.weights, grey, None).softmax(dim=1)[0].detach()
    labels = None if observation.labels is None else observation.labels.to(expected.device)
    if labels is None:
        bias = head_bias(observation.gradients, simulation.head)
        labels = infer_labels(bias, expected.to(bias), observation.num_examples)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hydra warns about its own next version
        settings = package.get_attack_config(config, overrides=list(overrides))
    names = APRIL_ORDER if settings.attack_type == "april-analytic" else simulation.names
    hidden = {} if update.mask is None else simulation.mask_kwargs(update.mask[None])
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
    user_metadata = {"num_data_points": observation.num_examples, "labels": labels, "local_hyperparams": None}
    gradients = [(observation.gradients if n not in target.values else {n: target.values[n][0]})[n] for n in names]
    setup = {"device": gradients[0].device, "dtype": torch.float}
    attacker = package.attacks.prepare_attack(model, nn.CrossEntropyLoss(), settings, setup)
    shared = {"gradients": gradients, "buffers": None, "metadata": user_metadata}
    return PreparedAttack(attacker, [payload], [shared], labels)


@dataclass(frozen=True, kw_only=True)
class BreachingAttack(Attack):
    """Base class: an attack of the package, on the last update.

    Args:
        seed: of its initial images and noise.
    """

    seed: int = 0

    config: ClassVar[str]
    in_suite: ClassVar[bool] = False
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MODEL_WEIGHTS})
    reads_every_parameter: ClassVar[bool] = True

    def require(self, threat_model: ThreatModel, name: str) -> None:
        """See `Attack.require`; the package must be installed."""
        breaching_package()
        super().require(threat_model, name)

    def overrides(self) -> list[str]:
        """Changes to the package's configuration, in hydra's syntax."""
        return []

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; `details` holds the first and the least value of the objective, and the steps."""
        observation = observations[-1]
        flags = extract_matched_update(observation).flags
        flags += ("labels_given",) if observation.labels is not None else ()
        prepared = prepare_attack(observation, self.config, self.overrides())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            normalised, values = prepared.run()
        images = observation.to_pixels(normalised).float()
        details = {"start_loss": values[0], "loss": min(values), "steps": len(values)} if values else {}
        if values and not values[-1] <= values[0]:
            flags += ("loss_above_start",)
        known = torch.zeros_like(images[:, :1], dtype=torch.bool)
        return Reconstruction(images, known, prepared.labels, flags=flags, details=details)


@dataclass(frozen=True, kw_only=True)
class BreachingOptimisation(BreachingAttack):
    """Base class: an iterative attack of the package.

    Args:
        steps: number of iterations.
    """

    steps: int = 300

    def overrides(self) -> list[str]:
        """See `BreachingAttack.overrides`."""
        return [f"optim.max_iterations={self.steps}"]


@dataclass(frozen=True, kw_only=True)
class BreachingInvertingGradients(BreachingOptimisation):
    """The package's configuration invertinggradients.yaml."""

    config: ClassVar[str] = "invertinggradients"


@dataclass(frozen=True, kw_only=True)
class BreachingSeeThroughGradients(BreachingOptimisation):
    """The package's configuration seethroughgradients.yaml; its batch-norm term has no effect on a ViT."""

    config: ClassVar[str] = "seethroughgradients"


@dataclass(frozen=True, kw_only=True)
class BreachingDeepLeakage(BreachingOptimisation):
    """The package's configuration deepleakage.yaml: optimises labels too, with up to 20 evaluations per iteration."""

    config: ClassVar[str] = "deepleakage"


@dataclass(frozen=True, kw_only=True)
class BreachingApril(BreachingAttack):
    """The package's configuration april_analytic.yaml: the closed form for a first block without norm and residual."""

    config: ClassVar[str] = "april_analytic"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MODEL_WEIGHTS, Capability.POSITION_GRADIENT})

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`.

        Raises:
            UsageError: the model is not a timm ViT, or the update lacks a gradient that the attack needs.
        """
        observation = observations[-1]
        find_first_attention(observation.model, find_tokenizer(observation.model, observation.image_shape).width)
        lacking = [name for name in APRIL_ORDER if name not in observation.gradients]
        if lacking:
            raise UsageError(f"breaching's AprilAttacker supports timm ViTs only; the update has no {lacking[0]}")
        return super().reconstruct(observations)
