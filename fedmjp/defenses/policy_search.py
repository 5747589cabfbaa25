"""The two scores by which ATS chooses transformation policies, and the search over random ones (Gao et al., CVPR 2021).

Privacy score: with the transformed image x and an image x_0 of uniform noise, the mean over i in [0, 1] of
the cosine between the gradients of (1 - i) x_0 + i x and of x, for a model that is partly trained. The lower it is, the
less a search that starts from noise is led to x. Accuracy score (after Mellor et al. 2021, "Neural
Architecture Search without Training"): of an untrained model, -sum (log(s + e) + 1 / (s + e)) over the eigenvalues s of
the correlations between images' gradients of the summed logits, e = 1e-5. The higher it is, the better the model tells
the transformed images apart. Policies below a least accuracy score are dropped, the others sorted by privacy.

Departs from the released code: the cosine is one over all parameters, as the paper writes it, where the code averages
those of single tensors; every policy has three transformations, where the code leaves out some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from attacks.policies import LIBRARY, read_policies
from attacks.transformations import transform_images
from fedmjp.models import BuiltModel

INTERVALS = 20  # of the path from noise to the image
EPSILON = 1e-5
LENGTH = 3  # transformations of a policy


@dataclass(frozen=True)
class ScoredPolicy:
    """A policy with its scores.

    Attributes:
        policy: as `read_policies` takes it.
        privacy: in [-1, 1], lower is better.
        accuracy: at most minus the number of images of the score, higher is better.
    """

    policy: str
    privacy: float
    accuracy: float


def privacy_score(model: BuiltModel, images: Tensor, labels: Tensor, generator: torch.Generator) -> float:
    """Mean over the images of the mean similarity of gradients along the path from noise, in [-1, 1].

    Args:
        model: partly trained, in evaluation mode.
        images: (B, C, H, W) in [0, 1], transformed.
        labels: (B,) int64.
        generator: draws the noise.
    """
    areas = []
    for image, label in zip(images[:, None], labels[:, None], strict=True):
        noise = torch.rand(image.shape, generator=generator).to(image)
        own = _gradient(model, image, label)
        places = torch.linspace(0, 1, INTERVALS + 1).tolist()
        on_path = (_gradient(model, (1 - i) * noise + i * image, label) for i in places)
        similar = torch.stack([functional.cosine_similarity(g, own, dim=0) for g in on_path])
        areas.append(torch.trapezoid(similar, dx=1 / INTERVALS))
    return float(torch.stack(areas).mean())


def accuracy_score(model: BuiltModel, images: Tensor) -> float:
    """How well an untrained model tells (N, C, H, W) transformed images in [0, 1] apart: at most -N."""
    inputs = model.normalise(images).requires_grad_()
    with torch.enable_grad():
        (slopes,) = torch.autograd.grad(model.module(inputs).sum(), inputs)
    sizes = torch.linalg.eigvalsh(torch.corrcoef(slopes.flatten(1).double())).clamp(min=0) + EPSILON
    return -float((sizes.log() + 1 / sizes).sum())


def random_policies(count: int, generator: torch.Generator) -> Iterator[str]:
    """Policies of three transformations, each drawn from the library."""
    for numbers in torch.randint(len(LIBRARY), (count, LENGTH), generator=generator).tolist():
        yield "-".join(map(str, numbers))


def score_policies(
    policies: Iterator[str],
    trained: BuiltModel,
    untrained: BuiltModel,
    images: Tensor,
    labels: Tensor,
    attacked: int,
    seed: int,
    on_policy: Callable[[ScoredPolicy], None] = lambda scored: None,
) -> list[ScoredPolicy]:
    """Score policies on the same images with the same random numbers.

    Args:
        policies: as `read_policies` takes them.
        trained, untrained: models for the privacy score and for the accuracy score.
        images: (N, C, H, W) in [0, 1], of the accuracy score.
        labels: (N,) int64.
        attacked: images of the privacy score, the first ones.
        seed: of the noise and of the transformations' signs.
        on_policy: called after each.
    """
    found = []
    for policy in policies:
        generator = torch.Generator().manual_seed(seed)
        changed = transform_images(images, read_policies(policy), generator)
        privacy = privacy_score(trained, changed[:attacked], labels[:attacked], generator)
        found.append(ScoredPolicy(policy, privacy, accuracy_score(untrained, changed)))
        on_policy(found[-1])
    return found


def _gradient(model: BuiltModel, image: Tensor, label: Tensor) -> Tensor:
    """Gradient of the cross-entropy of one image (1, C, H, W) in all parameters, flattened."""
    with torch.enable_grad():
        loss = functional.cross_entropy(model.module(model.normalise(image)), label)
        found = torch.autograd.grad(loss, list(model.module.parameters()), allow_unused=True)
    return torch.cat([g.flatten() for g in found if g is not None])
