"""The updates of many clients from one forward and one backward pass.

A client with one image sends the gradient of its own loss. The closed-form attacks use this gradient only at the token
embedding and at a few linear layers after it. There, every image's own gradient can be computed in a batch: parameters
that are added to tokens are replaced by one copy per image, and a linear layer's gradient is the product of its input
and its output's gradient, (dL/dW)_b = (dL/dy_b)^T x_b, which are both available in the batch's pass. No other weight's
gradient is computed. A test checks that the result equals the gradients computed one image at a time by autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from attacks import Observation, find_tokenizer
from fedmjp.defenses import ClientInput
from fedmjp.defenses.step import LocalStep, local_step
from fedmjp.models import BuiltModel
from fedmjp.objectives import TERMS, client_loss

# Parameters that a ViT adds to its tokens: their gradient per image needs one copy of them per image.
ADDED = ("pos_embed", "unk_embed", "cls_token")
NO_TERMS: Mapping[str, float] = MappingProxyType({})


@dataclass
class _Linear:
    """A linear layer's input and output in one pass, (B, T, in) and (B, T, out)."""

    input: Tensor | None = None
    output: Tensor | None = None


def attacked_gradients(
    built: BuiltModel,
    images: Tensor,
    labels: Tensor,
    position_mask: Tensor | None = None,
    *,
    layers: Sequence[str] = (),
    loss_weights: Mapping[str, float] = NO_TERMS,
) -> dict[str, Tensor]:
    """Each image's own gradient of its client's loss, at the token embedding and at given linear layers.

    Args:
        built: the model, a ViT.
        images: (B, C, H, W) in [0, 1], after the defence, in the model's type and on its device.
        labels: (B,) int64.
        position_mask: (B, N) bool, or None.
        layers: names of weight matrices of linear layers (`Attack.linear_layers`).
        loss_weights: weights of the terms added to the cross-entropy, by name (`Defense.loss_weights`); the terms may
            depend on the parameters that are added to tokens, and on the mask.

    Returns:
        Parameter name -> (B, *shape).

    Raises:
        UsageError: the model is not a ViT.
    """
    weights = {n: p.detach() for n, p in built.module.named_parameters()}
    copies = {n: weights[n].repeat(len(images), 1, 1).requires_grad_() for n in ADDED if n in weights}
    projection = find_tokenizer(built.module, (3, built.image_size, built.image_size)).weight
    seen = {name: _Linear() for name in (projection, *layers)}
    # The projection's weight is detached, so its output has a gradient only if its input requires one.
    inputs = built.normalise(images).requires_grad_()
    with torch.enable_grad(), _recorded(built.module, seen):
        extra = {} if position_mask is None else {"position_mask": position_mask}
        logits = functional_call(built.module, weights | copies, (inputs,), extra)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        outputs = [layer.output for layer in seen.values()]
        found = torch.autograd.grad(loss, [*copies.values(), *outputs], allow_unused=True)
    # The gradient of a parameter that no token used (the unknown embedding without a mask) is sent as zeros.
    added = zip(copies.items(), found[: len(copies)], strict=True)
    gradients = {n: (torch.zeros_like(c) if g is None else g).unsqueeze(1) for (n, c), g in added}  # (B, 1, rows, D)
    if loss_weights:
        _add_terms(gradients, built, len(images), position_mask, loss_weights)
    for (name, layer), delta in zip(seen.items(), found[len(copies) :], strict=True):
        gradients |= _linear_gradients(name, weights, layer.input.detach(), delta)
    return gradients


def observe_each(built: BuiltModel, gradients: Mapping[str, Tensor]) -> list[Observation]:
    """One `Observation` for each of B clients with one image.

    Args:
        built: the model that the clients were sent.
        gradients: parameter name -> (B, *shape).
    """
    count = len(next(iter(gradients.values())))
    return [_observation(built, {name: g[b] for name, g in gradients.items()}, 1, b) for b in range(count)]


def observe_groups(
    built: BuiltModel,
    seen: ClientInput,
    labels: Tensor,
    group: int,
    loss_weights: Mapping[str, float] = NO_TERMS,
    gradients_of: Callable[[int, LocalStep], dict[str, Tensor]] = lambda client, step: step.gradients(),
    freezes: Callable[[str], bool] = lambda name: False,
) -> list[Observation]:
    """One `Observation` of the whole update per client with `group` images, computed one client after the other.

    Args:
        built: the model that the clients were sent.
        seen: images (clients x group, C, H, W) in [0, 1] and, where positions are hidden, their mask.
        labels: (clients x group,) int64.
        group: images per client.
        loss_weights: weights of the terms added to the cross-entropy, by name.
        gradients_of: (place in this batch, step) -> the client's gradient by parameter (`Defense.gradients`).
        freezes: `Defense.freezes`.
    """

    def loss_of(views: tuple[ClientInput, ...], labels: Tensor) -> Tensor:
        """The supervised loss of one view of a batch."""
        return client_loss(built, views[0].images, labels, views[0].position_mask, loss_weights, views[0].origins)

    views = []
    for client, start in enumerate(range(0, len(labels), group)):
        own = slice(start, start + group)
        mask, origins = (None if t is None else t[own] for t in (seen.position_mask, seen.origins))
        step = local_step(built, freezes, (ClientInput(seen.images[own], mask, origins),), labels[own], loss_of)
        with torch.enable_grad():
            gradients = gradients_of(client, step)
        views.append(_observation(built, gradients, group, client))
    return views


def _observation(built: BuiltModel, gradients: Mapping[str, Tensor], count: int, client: int) -> Observation:
    return Observation(
        gradients=gradients,
        model=built.module,
        num_examples=count,
        image_shape=(3, built.image_size, built.image_size),
        mean=tuple(built.mean),
        std=tuple(built.std),
        client=client,
    )


def observe_together(observations: Sequence[Observation]) -> Observation:
    """The update of one client with a batch of images, from the updates that each image would give alone.

    The loss is the mean over the batch, and so is its gradient. If the images have different masks, their position rows
    are summed as in a real update.
    """
    parts = [o.gradients for o in observations]
    mean = {name: torch.stack([part[name] for part in parts]).mean(dim=0) for name in parts[0]}
    return replace(observations[0], gradients=mean, num_examples=len(observations))


def _add_terms(
    gradients: dict[str, Tensor], built: BuiltModel, count: int, mask: Tensor | None, weights: Mapping[str, float]
) -> None:
    """Add each image's gradient of the weighted terms, in place; they are cheap, so images are processed one by one."""
    own = dict(built.module.named_parameters())
    parameters = [own[name] for name in gradients if name in ADDED]
    for b in range(count):
        with torch.enable_grad():
            row = None if mask is None else mask[b : b + 1]
            loss = sum(weight * TERMS.get(name)(built, row) for name, weight in weights.items())
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
        for name, gradient in zip((n for n in gradients if n in ADDED), found, strict=True):
            if gradient is not None:
                gradients[name][b] += gradient


@contextmanager
def _recorded(module: nn.Module, layers: Mapping[str, _Linear]):
    """Context in which the input and output of each named layer are recorded in `layers`."""
    with ExitStack() as hooks:
        for name, layer in layers.items():

            def note(_, inputs: tuple[Tensor, ...], output: Tensor, layer: _Linear = layer) -> None:
                """A hook that keeps the layer's input and output."""
                layer.input, layer.output = inputs[0], output

            handle = module.get_submodule(name.rpartition(".")[0]).register_forward_hook(note)
            hooks.callback(handle.remove)
        yield


def _linear_gradients(name: str, weights: Mapping[str, Tensor], x: Tensor, delta: Tensor) -> dict[str, Tensor]:
    """Per-image gradients of one layer's weight and bias, (B, *shape) each.

    Args:
        name: of the weight.
        weights: the model's parameters by name.
        x: the layer's input, (B, T, in), or (B, C, H, W) for a patch projection.
        delta: gradient of its output, (B, T, out), or (B, out, rows, columns).
    """
    weight = weights[name]
    if weight.dim() == 4:
        x = F.unfold(x, weight.shape[-1], stride=weight.shape[-1]).mT  # (B, N, P)
        delta = delta.flatten(2).mT  # (B, N, D)
    found = {name: (delta.mT @ x).view(-1, *weight.shape)}
    bias = name.removesuffix("weight") + "bias"
    return found | ({bias: delta.sum(dim=1)} if bias in weights else {})
