"""Many clients' updates from one forward and one backward pass.

A client with one image sends the gradient of its own loss. The closed forms read it only where the tokens are made and
in a few linear layers behind, and there every image's own gradient can be had from a batch: parameters that are
added to tokens are given one copy an image, and a linear layer's gradient is the product of its input and its output's
gradient, (dL/dW)_b = (dL/dy_b)^T x_b, both of which the batch's pass has at hand. No other weight's gradient is
computed. A test proves the result equal to one-by-one autograd.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from attacks import Observation, find_tokenizer
from fedmjp.defenses import ClientInput
from fedmjp.models import BuiltModel
from fedmjp.objectives import TERMS, client_loss

# Parameters that a ViT adds to its tokens: their gradient an image needs a copy of them an image.
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
    """Each image's own gradient of its client's loss, where the tokens are made and at the layers that attacks read.

    Args:
        images: (B, C, H, W) in [0, 1], as the defence leaves them, of the model's type and on its device.
        labels: (B,) int64.
        position_mask: (B, N) bool, or None.
        layers: weight matrices of linear layers, by name (`Attack.linear_layers`).
        loss_weights: terms beyond the cross-entropy, by name of the objective (`Defense.loss_weights`); they may depend
            on the parameters that are added to tokens, and on the mask.

    Returns:
        Parameter name -> (B, *shape).

    Raises:
        UsageError: the model is no ViT.
    """
    weights = {n: p.detach() for n, p in built.module.named_parameters()}
    copies = {n: weights[n].repeat(len(images), 1, 1).requires_grad_() for n in ADDED if n in weights}
    projection = find_tokenizer(built.module, (3, built.image_size, built.image_size)).weight
    seen = {name: _Linear() for name in (projection, *layers)}
    # The projection's output has a gradient only if something before it has: its weight is detached.
    inputs = built.normalise(images).requires_grad_()
    with torch.enable_grad(), _recorded(built.module, seen):
        extra = {} if position_mask is None else {"position_mask": position_mask}
        logits = functional_call(built.module, weights | copies, (inputs,), extra)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        outputs = [layer.output for layer in seen.values()]
        found = torch.autograd.grad(loss, [*copies.values(), *outputs], allow_unused=True)
    # A parameter that no token used (the unknown embedding without a mask) sends zeros.
    added = zip(copies.items(), found[: len(copies)], strict=True)
    gradients = {n: (torch.zeros_like(c) if g is None else g).unsqueeze(1) for (n, c), g in added}  # (B, 1, rows, D)
    if loss_weights:
        _add_terms(gradients, built, len(images), position_mask, loss_weights)
    for (name, layer), delta in zip(seen.items(), found[len(copies) :], strict=True):
        gradients |= _linear_gradients(name, weights, layer.input.detach(), delta)
    return gradients


def observe_each(built: BuiltModel, gradients: Mapping[str, Tensor]) -> list[Observation]:
    """The adversary's view of each of the B clients whose gradients are stacked, (B, *shape) by name."""
    count = len(next(iter(gradients.values())))
    return [_observation(built, {name: g[b] for name, g in gradients.items()}, 1, b) for b in range(count)]


def observe_groups(
    built: BuiltModel,
    seen: ClientInput,
    labels: Tensor,
    group: int,
    loss_weights: Mapping[str, float] = NO_TERMS,
) -> list[Observation]:
    """The adversary's view of whole updates, one client after the other, each with `group` images.

    Args:
        seen: images (clients x group, C, H, W) in [0, 1] and, where positions are hidden, their mask.
        labels: (clients x group,) int64.
        loss_weights: terms beyond the cross-entropy, by name of the objective.
    """
    names, parameters = zip(*built.module.named_parameters(), strict=True)
    views = []
    for client, start in enumerate(range(0, len(labels), group)):
        own = slice(start, start + group)
        mask, origins = (None if t is None else t[own] for t in (seen.position_mask, seen.origins))
        with torch.enable_grad():
            loss = client_loss(built, seen.images[own], labels[own], mask, loss_weights, origins)
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
        sent = zip(names, parameters, found, strict=True)
        gradients = {name: torch.zeros_like(p) if g is None else g for name, p, g in sent}
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
    """The update of one client that holds several images in one batch, from what each of them would send alone.

    The loss is the mean over the batch, and so is its gradient. Images that are masked or not alike share the rows'
    sums as they would in a message.
    """
    parts = [o.gradients for o in observations]
    mean = {name: torch.stack([part[name] for part in parts]).mean(dim=0) for name in parts[0]}
    return replace(observations[0], gradients=mean, num_examples=len(observations))


def _add_terms(
    gradients: dict[str, Tensor], built: BuiltModel, count: int, mask: Tensor | None, weights: Mapping[str, float]
) -> None:
    """Add each image's gradient of the weighted terms, in place; they are small, and so taken one by one."""
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
    """Within it, each named layer's module notes what goes in and what comes out."""
    with ExitStack() as hooks:
        for name, layer in layers.items():

            def note(_, inputs: tuple[Tensor, ...], output: Tensor, layer: _Linear = layer) -> None:
                layer.input, layer.output = inputs[0], output

            handle = module.get_submodule(name.rpartition(".")[0]).register_forward_hook(note)
            hooks.callback(handle.remove)
        yield


def _linear_gradients(name: str, weights: Mapping[str, Tensor], x: Tensor, delta: Tensor) -> dict[str, Tensor]:
    """Gradients of one layer's weight and bias an image: (B, *shape) each.

    Args:
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
