"""Soteria: perturb the representation from which the last layer's gradient is computed (Sun et al., "Soteria: Provable
Defense against Privacy Leakage in Federated Learning from Representation Perspective", CVPR 2021).

With r = f(x) the input of the classifier, the paper looks for r' that differs from r in few entries and maximises the
distance between x and the input that r' belongs to. To first order that sets the entries with the largest ||r_i (grad_x
f(r_i))^-1|| = |r_i| / ||dr_i/dx|| to zero: those that only a large change of the image could remove. The classifier's
weight gradient is then dL/dW = mean over images of (dL/dlogits) r'^T. All other gradients, that of the classifier's
bias among them, are those of the undefended step.

The released code (github.com/jeremy313/Soteria) prunes in the same direction: it keeps the entries with the largest
||dr_i/dx|| / (r_i + 0.1), summed over the batch, for features behind a ReLU. Departs from it: the representation of a
ViT has both signs, so the ratio is taken to |r_i|; and every image has its own entries, as in the paper.

The Jacobian costs one backward pass to the image for each channel of the representation. Images whose gradients mix in
the forward pass (batch norms in training) have their Jacobians mixed as well.

What is perturbed is read by no closed form at the patch projection, and an attack that matches gradients may leave it
out (Balunovic et al. 2022, arXiv:2111.04706; `leave_out` of the attacks here).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from attacks.registry import UsageError
from fedmjp.defenses.base import FIRST_LAYERS, Defense

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedmjp.data.augmentations import Augmentation
    from fedmjp.defenses.step import LocalStep
    from fedmjp.objectives import Objective


@dataclass(frozen=True)
class Soteria(Defense):
    """Options of --defense soteria."""

    known_by: ClassVar[tuple[str, ...]] = FIRST_LAYERS

    pruned_features: float = 0.8
    """Share of the representation's entries that are set to zero, in [0, 1] (0.01 and 0.6 in the released
    code's README, 0.7 and 0.8 in the attack code of arXiv:2111.04706)."""

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
        if not 0 <= self.pruned_features <= 1:
            raise UsageError(f"--pruned-features must lie in [0, 1], not {self.pruned_features}")

    def check(self, objective: Objective, augmentation: Augmentation | None) -> None:
        """Refuse objectives that train no classifier of whole images."""
        if not objective.needs_labels or objective.per_pixel:
            raise UsageError(
                "--defense soteria acts on the classifier's gradient, and this --objective trains no classifier of "
                "images; pass --objective supervised"
            )

    def gradients(self, step: LocalStep, generator: torch.Generator) -> dict[str, Tensor]:
        """The step's gradients, with the classifier's weight gradient from perturbed representations.

        Raises:
            UsageError: the loss is not that of one pass through a linear classifier.
        """
        import torch

        from fedmjp.models.classifier import classifier_name, recorded_calls

        module = step.model.module
        name = classifier_name(module, "soteria")
        if f"{name}.weight" not in step.trained:
            return step.gradients()
        views = tuple(replace(view, images=view.images.detach().requires_grad_()) for view in step.views)
        with recorded_calls(module.get_submodule(name)) as calls:
            step.loss = step.loss_of(views, step.labels)
        if len(calls) != 1:
            raise UsageError(f"soteria needs one pass through the classifier a step, not {len(calls)}")
        features, logits = calls[0]  # (B, D), (B, K)
        (slopes,) = torch.autograd.grad(step.loss, logits, retain_graph=True)
        images, scale = views[0].images, torch.tensor(step.model.std).to(views[0].images)
        sensitivity = jacobian_norms(features, images, scale)
        pruned = pruned_entries(features.detach(), sensitivity, self.pruned_features)
        weight = step.trained[f"{name}.weight"]  # activations may have fewer digits
        lost = slopes.to(weight).mT @ (features.detach() * pruned).to(weight)
        found = step.gradients()
        return found | {f"{name}.weight": found[f"{name}.weight"] - lost}


def jacobian_norms(features: Tensor, images: Tensor, scale: Tensor) -> Tensor:
    """||dr_i/dx|| of every entry of every image's representation, (B, D), x the normalised image.

    Args:
        features: (B, D), with their graph, which is kept.
        images: (B, C, H, W) in [0, 1], of which `features` are a function.
        scale: (C,), deviations of the normalisation: dr/dx = dr/dpixel * deviation.
    """
    import torch

    norms = []
    for channel in features.unbind(dim=1):
        (found,) = torch.autograd.grad(channel.sum(), images, retain_graph=True)
        norms.append((found * scale.view(-1, 1, 1)).flatten(1).norm(dim=1))
    return torch.stack(norms, dim=1)


def pruned_entries(features: Tensor, sensitivity: Tensor, share: float) -> Tensor:
    """(B, D) bool, for each image the round(share D) entries with the least sensitivity / |feature|."""
    import torch

    ratios = sensitivity / features.abs().clamp(min=torch.finfo(features.dtype).tiny)
    chosen = ratios.argsort(dim=1)[:, : round(share * features.shape[1])]
    return torch.zeros_like(features, dtype=torch.bool).scatter(1, chosen, True)
