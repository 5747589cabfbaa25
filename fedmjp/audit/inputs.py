"""Checks of what a user hands in: images, normalisation, gradients by name, and whether they belong together.

A mistake that leaves nothing to audit is a `UsageError` of one line. What can be put right, or what an audit can live
with, is a `Finding` that the answer shows.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attacks import Observation, UsageError
from attacks.certificate import reproduce
from attacks.findings import Finding
from attacks.fingerprints import scaled_loss
from attacks.frozen import without_frozen
from attacks.gradient_matching.random_masks import drop_rate
from fedmjp.models.weights import bare_name

# Normalisations in common use, tried where the one passed does not reproduce the gradient: mean, standard deviation.
COMMON = (
    ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # ImageNet
    ((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)),  # CIFAR-10
    ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.201)),  # CIFAR-10, as often copied
    ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),  # CLIP
)
# Relative residuals: above the first the recomputed gradient is another one, below the second it is the same.
DIFFERENT, SAME = 1e-2, 1e-3
# Findings that leave the gradients that were sent as they are.
NO_CHANGE = ("missing_gradients", "zero_gradients", "unknown_names", "repeated_images")
UNREPEATABLE = Finding(
    "not_reproduced",
    "whether mean, std and images belong to the gradient could not be checked: the step cannot be repeated with what "
    "was passed (labels of larger batches, a classifier with its bias, a model without batch norm)",
    hinders=True,
)
MOST_NAMED = 3  # parameters in a message


def check_images(images: Any) -> Tensor:
    """A batch of images, (B, C, H, W) in [0, 1].

    Raises:
        UsageError: something else, saying what to pass.
    """
    if not isinstance(images, Tensor):
        raise UsageError(f"images must be a tensor (B, C, H, W) in [0, 1], not {type(images).__name__}")
    if images.dim() != 4 or not images.numel():
        hint = "; add the batch dimension with images[None]" if images.dim() == 3 else ""
        raise UsageError(f"images must have the shape (B, C, H, W), not {tuple(images.shape)}{hint}")
    if not images.is_floating_point():
        hint = "; divide by 255" if images.dtype == torch.uint8 else ""
        raise UsageError(f"images must be floating-point numbers in [0, 1], not {images.dtype}{hint}")
    if not images.isfinite().all():
        raise UsageError("images hold NaN or infinity")
    low, high = float(images.min()), float(images.max())
    if low < 0 or high > 1:
        hint = "divide by 255" if low >= 0 and high > 2 else "pass the images before normalisation, and mean and std"
        raise UsageError(f"images must lie in [0, 1], these reach from {low:.3g} to {high:.3g}: {hint}")
    return images.detach()


def check_normalisation(
    mean: Sequence[float], std: Sequence[float], channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation as tuples of one number a channel.

    Raises:
        UsageError: another number of channels, or no positive finite standard deviation.
    """
    found = []
    for name, given in (("mean", mean), ("std", std)):
        try:
            values = tuple(float(v) for v in given)
        except (TypeError, ValueError):
            raise UsageError(f"{name} must be one number a channel, such as (0.5, 0.5, 0.5), not {given!r}") from None
        if len(values) != channels or not all(math.isfinite(v) for v in values):
            raise UsageError(f"{name} must be {channels} finite numbers, one a channel of the images, not {values}")
        found.append(values)
    if not all(v > 0 for v in found[1]):
        raise UsageError(f"std must be positive, not {found[1]}")
    return found[0], found[1]


def check_labels(labels: Any, count: int) -> Tensor:
    """Labels (B,) int64.

    Raises:
        UsageError: another shape or type, or negative.
    """
    labels = torch.as_tensor(labels)
    if labels.shape != (count,) or labels.is_floating_point() or labels.is_complex():
        raise UsageError(
            f"labels must be {count} whole numbers, one an image, not {labels.dtype} {tuple(labels.shape)}"
        )
    if (labels < 0).any():
        raise UsageError(f"labels must not be negative, and the least is {int(labels.min())}")
    return labels.long()


def unwrap(model: nn.Module) -> tuple[nn.Module, list[Finding]]:
    """The model inside `DataParallel`, `DistributedDataParallel` and `torch.compile`, and what was taken off.

    Raises:
        UsageError: no torch module.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    wrappers = []
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            break
        wrappers.append(type(model).__name__)
        model = inner
    said = f"the model inside {' and '.join(wrappers)} was attacked"
    return model, [Finding("wrapped_model", said, fixed=True)] if wrappers else []


def check_gradients(
    model: nn.Module, gradients: Any, what: str = "gradient"
) -> tuple[dict[str, Tensor], list[Finding]]:
    """Gradients by the model's own parameter names, on its device, and what was changed to get there.

    Args:
        model: see `unwrap`.
        gradients: by name; tensors or numpy arrays, None for a parameter without gradient. Names may have the prefixes
            of wrappers; the names of the model's buffers are left out.
        what: the word for one of them in messages.

    Raises:
        UsageError: no mapping, no name of a parameter, a gradient of another shape, or NaN and infinity.
    """
    if not isinstance(gradients, Mapping):
        raise UsageError(f"gradients must be a dictionary by parameter name, not {type(gradients).__name__}")
    parameters = dict(model.named_parameters())
    canonical = {bare_name(name): name for name in parameters}
    buffers = {bare_name(name) for name, _ in model.named_buffers()}
    found: dict[str, Tensor] = {}
    unknown, prefixed, converted = [], [], []
    for given, value in gradients.items():
        name = canonical.get(bare_name(str(given)))
        if name is None:
            unknown += [str(given)] if bare_name(str(given)) not in buffers else []
            continue
        if name != given:
            prefixed.append(str(given))
        if value is None:
            continue
        if not isinstance(value, Tensor):
            converted.append(name)
        found[name] = _tensor(f"the {what} of {name}", value, parameters[name])
    if not found:
        raise UsageError(_nothing_matches(model, gradients, unknown))
    return found, _said_of_names(model, found, unknown, prefixed, converted)


def _tensor(label: str, value: Any, parameter: nn.Parameter) -> Tensor:
    """A gradient as a tensor of the parameter's shape, on its device.

    Raises:
        UsageError: it is none.
    """
    try:
        gradient = torch.as_tensor(np.asarray(value) if not isinstance(value, Tensor) else value.detach())
    except (TypeError, ValueError):
        raise UsageError(f"{label} is no array of numbers: {type(value).__name__}") from None
    if gradient.shape != parameter.shape:
        raise UsageError(f"{label} has the shape {tuple(gradient.shape)}, the parameter {tuple(parameter.shape)}")
    if not gradient.is_floating_point():
        raise UsageError(
            f"{label} is of type {gradient.dtype}: pass floating-point numbers, quantised values times their scale"
        )
    if not gradient.isfinite().all():
        raise UsageError(f"{label} holds NaN or infinity")
    return gradient.to(parameter.device)


def _nothing_matches(model: nn.Module, gradients: Mapping, unknown: Sequence[str]) -> str:
    if not gradients:
        return "gradients is empty; pass one tensor for each parameter, by the names of model.named_parameters()"
    if not unknown:
        return "all gradients are None; call backward() first, or pass what torch.autograd.grad returns"
    names = [name for name, _ in model.named_parameters()]
    near = difflib.get_close_matches(unknown[0], names, n=1) or names[:1]
    return (
        f"no name in gradients is a parameter of {type(model).__name__}: {unknown[0]!r} is not, {near[0]!r} is; pass "
        "them by the names of model.named_parameters()"
    )


def _said_of_names(
    model: nn.Module, found: Mapping, unknown: Sequence[str], prefixed: Sequence[str], converted: Sequence[str]
) -> list[Finding]:
    missing = [name for name, _ in model.named_parameters() if name not in found]
    said = []
    if prefixed:
        said.append(
            Finding("prefixed_names", f"prefixes of wrappers were removed from the names {_some(prefixed)}", fixed=True)
        )
    if converted:
        said.append(Finding("converted", f"{len(converted)} arrays were converted to tensors", fixed=True))
    if unknown:
        said.append(Finding("unknown_names", f"these names are no parameters of the model: {_some(unknown)}"))
    if missing:
        said.append(Finding("missing_gradients", f"the update holds no gradient of {_some(missing)}"))
    return said


def _some(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def frozen_parameters(observation: Observation) -> list[Finding]:
    """Whether an update holds zeros that count as not sent (`attacks.frozen`)."""
    sent = without_frozen(observation).gradients
    zero = [name for name in observation.gradients if name not in sent]
    if not zero:
        return []
    words = f"the update holds nothing but zeros for {_some(zero)}: they count as not sent (frozen)"
    return [Finding("zero_gradients", words)]


def repeated_images(images: Tensor) -> list[Finding]:
    """Whether a batch (B, C, H, W) holds an image more than once."""
    different = len(images.flatten(1).unique(dim=0))
    if different == len(images):
        return []
    return [
        Finding(
            "repeated_images",
            f"the batch of {len(images)} holds {different} different image{'s' * (different != 1)}: a repeated image "
            "counts as one, so this batch leaks more than one of different images",
        )
    ]


def check_reproduced(observation: Observation, images: Tensor, found: Sequence[Finding]) -> list[Finding]:
    """Whether model, images, normalisation and labels reproduce the gradient, as far as the step can be repeated.

    Args:
        observation: the update; its labels, if any, are those of `images`.
        images: (B, C, H, W) in [0, 1], the client's batch.
        found: what was recognised about the update; what was done to it afterwards explains a difference.
    """
    if any(_is_random(module) for module in observation.model.modules()):
        return [
            Finding(
                "not_reproduced",
                "whether mean, std and images belong to the gradient was not checked: the model is in training mode "
                "with dropout",
                hinders=True,
            )
        ]
    residual, factor = reproduce(observation, images)
    if math.isnan(residual):
        return [] if any(finding.hinders for finding in found) else [UNREPEATABLE]
    if residual <= DIFFERENT:
        return _scaled(factor, found) if residual <= SAME else []
    largest = _explained(found)
    if len(observation.mean) == 3:
        for mean, std in COMMON:
            other = reproduce(replace(observation, mean=mean, std=std), images)[0]
            if other < SAME or other < residual / 2 and other <= largest < math.inf:
                return [
                    Finding(
                        "normalisation",
                        f"mean {_numbers(observation.mean)} and std {_numbers(observation.std)} do not reproduce the "
                        f"gradient (difference {residual:.0%}), but mean {_numbers(mean)} and std {_numbers(std)} do: "
                        "pass those",
                        hinders=True,
                    )
                ]
    if residual <= largest:
        return []
    return [
        Finding(
            "not_reproduced",
            f"the gradient of the cross-entropy at these images, mean, std and weights differs from the one given by "
            f"{residual:.0%}: check mean and std, that the weights are those before the step, and the client's loss",
            hinders=True,
        )
    ]


def _explained(found: Sequence[Finding]) -> float:
    """By how much what was found makes the gradient differ from that of the images, at most; 0 for not at all."""
    return max((one.changes for one in found if not one.fixed and one.name not in NO_CHANGE), default=0.0)


def _is_random(module: nn.Module) -> bool:
    """Whether it drops units (dropout) or branches (stochastic depth) at random."""
    return module.training and drop_rate(module) > 0


def _scaled(factor: float, found: Sequence[Finding]) -> list[Finding]:
    if abs(factor - 1) < DIFFERENT or any(finding.name == "clipping" for finding in found):
        return []
    return [scaled_loss(factor)]


def _numbers(values: Sequence[float]) -> str:
    return f"({', '.join(f'{v:g}' for v in values)})"
