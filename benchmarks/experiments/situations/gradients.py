"""Situations of `audit_gradient`: what people hand in, rightly and wrongly."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.situations import models
from experiments.situations.answers import Answer, of_audit

HALF = (0.5, 0.5, 0.5)
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Handed:
    """What is handed to `audit_gradient`.

    Attributes:
        model: with the weights at which the gradient was taken, unless the situation is another.
        images: (B, 3, 32, 32) in [0, 1].
        gradients: by parameter name.
        mean, std: the normalisation.
    """

    model: nn.Module
    images: Tensor
    gradients: Mapping[str, Any]
    mean: tuple[float, ...] = HALF
    std: tuple[float, ...] = HALF

    def changed(self, change: Callable[[Tensor], Tensor]) -> Handed:
        """With every gradient changed."""
        return replace(self, gradients={name: change(g) for name, g in self.gradients.items()})


@cache
def photographs(*numbers: int) -> Tensor:
    """Crops of the embedded photographs, (B, 3, 32, 32) in [0, 1]."""
    from fedmjp.data import load_data

    return load_data("photos", size=32).train.images(list(numbers))


def normalise(images: Tensor, mean: tuple[float, ...] = HALF, std: tuple[float, ...] = HALF) -> Tensor:
    """What the model is fed."""
    return (images - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


def gradients_of(model: nn.Module, inputs: Tensor, decay: float = 0.0) -> dict[str, Tensor]:
    """What a client sends after one step on `inputs`, already normalised, with `decay` times the weights added."""
    output = model(inputs)
    for name in ("logits", "sup"):
        output = getattr(output, name, output)
    loss = cross_entropy(output, torch.arange(len(inputs)) % models.CLASSES)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = zip(names, parameters, found, strict=True)
    return {n: (torch.zeros_like(p) if g is None else g) + decay * p.detach() for n, p, g in pairs}


def honest(make: Callable[[], nn.Module] = models.timm_vit, images: Tensor | None = None, **options: Any) -> Handed:
    """One step, handed in as it should be."""
    torch.manual_seed(0)
    model, images = make(), photographs(1) if images is None else images
    return Handed(model, images, gradients_of(model, normalise(images), **options))


def audited(handed: Handed) -> Answer:
    """The answer of `audit_gradient`."""
    from fedmjp.audit import audit_gradient

    return of_audit(audit_gradient(handed.model, handed.images, handed.gradients, mean=handed.mean, std=handed.std))


def wrong_normalisation() -> Handed:
    """The client normalises by ImageNet's mean and std; the audit is given others."""
    handed = honest()
    return replace(handed, gradients=gradients_of(handed.model, normalise(handed.images, *IMAGENET)))


def no_normalisation() -> Handed:
    """The client normalises; the audit is given mean 0 and std 1."""
    return replace(honest(), mean=(0.0,) * 3, std=(1.0,) * 3)


def other_weights() -> Handed:
    """The step is taken before the model is handed in."""
    handed = honest()
    for name, parameter in handed.model.named_parameters():
        parameter.data -= 0.1 * handed.gradients[name]
    return handed


def flipped() -> Handed:
    """The client flips the image, and the audit gets the image as it was before."""
    handed = honest()
    return replace(handed, gradients=gradients_of(handed.model, normalise(handed.images.flip(-1))))


def dropout() -> Handed:
    """The client trains with dropout on tokens, probability 0.1."""
    return honest(lambda: models.timm_vit(proj_drop_rate=0.1, pos_drop_rate=0.1).train())


def renamed(prefix: str) -> Handed:
    """The parameter names of the gradient start with `prefix`, as wrappers of the model leave them."""
    handed = honest()
    return replace(handed, gradients={prefix + name: g for name, g in handed.gradients.items()})


def without(*parts: str, value: Any = "absent") -> Handed:
    """Without the gradients whose names hold one of `parts`, or with `value` in their place."""
    handed = honest()
    kept = {n: g for n, g in handed.gradients.items() if not any(part in n for part in parts)}
    left = {} if value == "absent" else {n: value for n in handed.gradients if n not in kept}
    return replace(handed, gradients=kept | left)


def only(*parts: str) -> Handed:
    """Nothing but the gradients whose names hold one of `parts`."""
    handed = honest()
    return replace(handed, gradients={n: g for n, g in handed.gradients.items() if any(part in n for part in parts)})


def clipped() -> Handed:
    """The gradient of all parameters together is scaled to L2 norm 1."""
    handed = honest()
    norm = torch.stack([g.square().sum() for g in handed.gradients.values()]).sum().sqrt()
    return handed.changed(lambda g: g / norm)


def top_k(share: float) -> Handed:
    """Of each tensor, the `share` (0 to 1) of entries of largest magnitude is kept; the others are zero."""

    def keep(gradient: Tensor) -> Tensor:
        least = gradient.abs().flatten().kthvalue(max(1, int((1 - share) * gradient.numel()))).values
        return gradient * (gradient.abs() > least)

    return honest().changed(keep)


def int8(gradient: Tensor) -> Tensor:
    """Rounded to 255 levels a tensor."""
    step = gradient.abs().max().clamp(min=1e-30) / 127
    return (gradient / step).round() * step


def adam() -> Handed:
    """Adam's first step in place of the gradient: its sign, almost everywhere."""
    return honest().changed(lambda g: g / (g.abs() + 1e-8))


def noisy(sigma: float) -> Handed:
    """Gaussian noise of standard deviation `sigma` is added to every entry, without clipping."""
    torch.manual_seed(1)
    return honest().changed(lambda g: g + sigma * torch.randn_like(g))


def summed() -> Handed:
    """Gradients of two batches added up, of which the audit gets the images of the last."""
    handed = honest()
    more = gradients_of(handed.model, normalise(photographs(2)))
    return replace(handed, gradients={n: g + more[n] for n, g in handed.gradients.items()})


def saturated() -> Handed:
    """A model so sure of the label that its gradient vanishes."""
    torch.manual_seed(0)
    model, images = models.timm_vit(), photographs(1)
    model.head.bias.data[0] = 60.0
    return Handed(model, images, gradients_of(model, normalise(images)))


def released_layout(masked: bool) -> Handed:
    """The released MJP code's table of N + 2 position rows; if `masked`, 32 of the 64 patches have the unknown row."""
    torch.manual_seed(0)
    model, images = models.ReleasedLayout(), photographs(1)
    mask = torch.zeros(1, 65, dtype=torch.long)
    mask[0, 1:33] = int(masked)
    wrapped = copy.copy(model)
    wrapped.forward = lambda inputs: model.forward(inputs, mask)
    return Handed(model, images, gradients_of(wrapped, normalise(images)))


def resnet() -> Handed:
    """A model without a patch projection, which the audit cannot read."""
    import torchvision

    return honest(lambda: torchvision.models.resnet18(num_classes=models.CLASSES).eval())


def nan_in(handed: Handed) -> Handed:
    """The largest entry of each tensor is NaN."""
    return handed.changed(lambda g: torch.where(g == g.max(), torch.nan, g))


def case(make: Callable[[], Handed]) -> Callable[[], Answer]:
    """`make` and the audit of it, as a function without arguments."""
    return lambda: audited(make())


GRADIENTS: dict[str, tuple[str, Callable[[], Answer]]] = {
    "timm": ("one step of timm's ViT, handed in as it should be", case(honest)),
    "hugging_face": ("Hugging Face's ViT", case(lambda: honest(models.hugging_face_vit))),
    "torchvision": ("torchvision's ViT as it comes (its classifier starts at zero)",
                    case(lambda: honest(models.torchvision_vit))),
    "released_layout": ("MJP's released layout, a table of N + 2 rows, no patch masked",
                        case(lambda: released_layout(False))),
    "released_layout_masked": ("the same with half of the patches masked", case(lambda: released_layout(True))),
    "fixed_positions": ("sine and cosine positions that are not trained", case(lambda: honest(models.FixedPositions))),
    "resnet": ("a ResNet", case(resnet)),
    "wrong_normalisation": ("the client used another mean and std than those passed", case(wrong_normalisation)),
    "no_normalisation": ("`mean` and `std` were forgotten", case(no_normalisation)),
    "normalised_images": ("images passed after normalisation",
                          case(lambda: replace(honest(), images=normalise(photographs(1))))),
    "byte_images": ("images from 0 to 255", case(lambda: replace(honest(), images=photographs(1) * 255))),
    "no_batch_axis": ("one image without the batch dimension",
                      case(lambda: replace(honest(), images=photographs(1)[0]))),
    "module_prefix": ("names of `DataParallel`: `module.`", case(lambda: renamed("module."))),
    "none_gradients": ("`None` for parameters without a gradient", case(lambda: without("blocks.1.", value=None))),
    "numpy_gradients": ("gradients as NumPy arrays", case(lambda: honest().changed(lambda g: g.numpy()))),
    "partial": ("a dictionary without the position embedding", case(lambda: without("pos_embed"))),
    "head_only": ("a dictionary with the classifier's gradient only", case(lambda: only("head"))),
    "nan": ("a gradient that holds NaN", case(lambda: nan_in(honest()))),
    "adam": ("Adam's first step in place of the gradient", case(adam)),
    "weight_decay": ("weight decay 0.05 added to the gradient", case(lambda: honest(decay=0.05))),
    "clipped": ("the gradient clipped to norm 1", case(clipped)),
    "noisy": ("Gaussian noise, σ = 0.001, on every entry", case(lambda: noisy(1e-3))),
    "half": ("the gradient in half precision", case(lambda: honest().changed(lambda g: g.half().float()))),
    "int8": ("the gradient rounded to 8 bits a tensor", case(lambda: honest().changed(int8))),
    "top_k": ("the largest 10 % of each tensor only", case(lambda: top_k(0.1))),
    "batch_of_two": ("a batch of two images", case(lambda: honest(images=photographs(1, 2)))),
    "repeated_image": ("a batch that holds one image twice", case(lambda: honest(images=photographs(1, 1)))),
    "summed": ("the sum of two batches' gradients, with the images of one", case(summed)),
    "other_weights": ("the model is passed after its optimiser's step", case(other_weights)),
    "dropout": ("dropout was on when the gradient was taken", case(dropout)),
    "flipped": ("the client flips the image at random, the original is passed", case(flipped)),
    "saturated": ("a model so certain that its gradient is almost zero", case(saturated)),
}  # fmt: skip
