"""A classifier that a client's own steps leave as it was sent: one class alone sends in all local steps, not the first.

Where all rows of the classifier but w_t are zero, the first step moves the other rows by -rate (p_c - y_c) h, and from
the second step on every image sends a gradient. Here all rows are one vector X of equal entries, and w_t = X + S v with
S the spacing of float32 numbers at X: what a step adds to an entry, less than S / 2, is lost in the sum, and the rows
stay equal. The bias of one class a (the anchor) lies so far above the others that p_a = 1 and all other p_c = 0 for
every image, in the client's arithmetic. An image of class y then sends w_a - w_y to the features: exactly nothing but
for class t, which sends -S v, in every step, whatever the steps do to the layers below. A sum of steps on one image is
solved as one step is (`attacks.closed_form.patch_embedding`), and the biases, which move, count the images.

So large a row would tear the layers below apart. A bias of +-S / row in half of the channels before the last norm
makes its deviation S / row, and the layers below get the gradient of a classifier's row with entries `row`; v lies in
the other half of the channels.

Adam divides by the size of an entry's gradient, its epsilon (1e-8) added. With a row that leaves all of them far below
epsilon, what it does is linear in them: its steps are those of SGD with momentum at the rate / epsilon. Weights that
move so little need their digits: the patch projection is sent as zero, and so are most channels of the positions, whose
rest keeps the tokens apart. The returned weights of these channels are the gradient without round-off of the weights,
and what is read is these channels' equations (`exact_channels`).

No paper is known to us that does so. It presumes weights of float32 on the client: under half precision X overflows or
moves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from attacks.observation import Observation
from attacks.registry import UsageError
from attacks.tokenizer import find_tokenizer

LocalSteps = Literal["one", "sgd", "adamw"]

# Of the channels, one in so many keeps its position embedding.
KEPT = 8
# The anchor's bias: logits of trained models differ by no more than 1e17, and no step moves it.
ANCHOR_BIAS = 1e25
# X in units of S: between two powers of two, so that its spacing is S upwards and downwards.
SPACINGS = 1.5 * 2**23


@dataclass(frozen=True)
class Sizes:
    """What is set for an optimiser.

    Attributes:
        spacing: S, a power of two. A step that moves a row by less than half of it moves nothing.
        row: size of an entry of the row as the layers below see it.
    """

    spacing: float
    row: float


# SGD: features are at most 1.5, so that a step moves a row by little more than the rate. S is far above it because the
# decay that SGD adds to the gradient comes with X, and the sum is rounded another way for one entry in S / rate. `row`
# is about an entry of the classifiers of the shipped models. AdamW: rates below 0.1, and (S / row)^2 is a float32; the
# gradients of the layers below are 1e-15 and less, seven orders below epsilon.
SIZES = {"sgd": Sizes(2.0**20, 0.05), "adamw": Sizes(1.0, 1e-16)}


@dataclass(frozen=True)
class TrunkEnd:
    """The last layers before the classifier.

    Attributes:
        norm: name of the norm whose output, of one token or its mean over tokens, the classifier reads.
        last: name of the linear layer whose output is added before it.
    """

    norm: str
    last: str


def held_model(
    model: nn.Module, image_shape: tuple[int, int, int], layer: str, target: int, anchor: int, steps: LocalSteps
) -> dict[str, Tensor]:
    """Parameters by name of a model that class `target` alone sends through, in every local step.

    Args:
        image_shape: (C, H, W).
        layer: name of the classifier.
        target, anchor: two classes.
        steps: what the client's optimiser is, a key of `SIZES`.

    Raises:
        UsageError: the classifier reads no norm's output, or no linear layer is added before that norm.
    """
    sizes, end, head = SIZES[steps], find_end(model, image_shape, layer), model.get_submodule(layer)
    tokenizer, parameters = find_tokenizer(model, image_shape), dict(model.named_parameters())
    width = head.in_features
    wide = torch.arange(width) < width // 4 * 2
    signs = 1.0 - 2.0 * (torch.arange(width) % 2)
    weight = torch.full_like(head.weight, SPACINGS * sizes.spacing)
    weight[target] += (sizes.spacing * signs * ~wide).to(weight)
    bias = torch.zeros_like(head.bias)
    bias[anchor] = ANCHOR_BIAS
    found = {f"{layer}.weight": weight, f"{layer}.bias": bias}
    found |= {f"{end.norm}.weight": torch.ones(width), f"{end.norm}.bias": torch.zeros(width)}
    found[f"{end.last}.bias"] = signs * wide * (2**0.5 * sizes.spacing / sizes.row)
    found |= {name: torch.zeros_like(parameters[name]) for name in (tokenizer.weight, tokenizer.bias) if name}
    if tokenizer.positions is not None:
        positions = parameters[tokenizer.positions].detach().clone()
        positions[..., width // KEPT :] = 0
        found[tokenizer.positions] = positions
    return {name: value.to(parameters[name]) for name, value in found.items()}


def exact_channels(observation: Observation) -> Observation:
    """The update as a plain gradient, with nothing but the equations of those channels whose weights were sent as zero.

    What solves channel by channel is given some of them twice, in the places of the others; zeros would be taken for
    entries that were not sent.
    """
    tokenizer, sent = find_tokenizer(observation.model, observation.image_shape), observation.model
    parameters = dict(sent.named_parameters())
    zero = ~parameters[tokenizer.weight].detach().flatten(1).any(dim=1)
    gradients = dict(observation.gradients)
    if tokenizer.positions in parameters:
        zero &= ~parameters[tokenizer.positions].detach().flatten(0, -2).any(dim=0)
    places = zero.nonzero()[:, 0]
    chosen = torch.arange(len(zero), device=zero.device)
    chosen[~zero] = places[: int((~zero).sum())]
    for name in (tokenizer.weight, tokenizer.bias, tokenizer.positions, tokenizer.shared_position):
        if name in gradients:
            channels = 0 if name in (tokenizer.weight, tokenizer.bias) else -1
            gradients[name] = gradients[name].index_select(channels, chosen)
    return replace(observation, gradients=gradients, kind="gradient", learning_rate=0.0, bounds={})


def find_end(model: nn.Module, image_shape: tuple[int, int, int], layer: str) -> TrunkEnd:
    """The last norm before the classifier, and the linear layer whose bias is added to what it reads.

    Both are checked on a copy: the norm's bias must be the classifier's input where the norm's weight is zero, and the
    layer's bias must move the norm's input by as much as itself.

    Args:
        image_shape: (C, H, W).
        layer: name of the classifier.

    Raises:
        UsageError: there is no such norm, or no such layer.
    """
    twin = copy.deepcopy(model).eval()
    width = twin.get_submodule(layer).in_features
    modules = dict(twin.named_modules())
    norms = {n: m for n, m in modules.items() if isinstance(m, nn.LayerNorm) and m.normalized_shape == (width,)}
    linear = {n: m for n, m in modules.items() if isinstance(m, nn.Linear) and m.out_features == width}
    inputs, order = _inputs(twin, image_shape, [*norms, *linear, layer])
    order = order[: order.index(layer)]
    norm = next((n for n in reversed(order) if n in norms and norms[n].bias is not None), None)
    reads = f"the classifier {layer} reads no LayerNorm's output, so that it cannot be held through local steps"
    if norm is None:
        raise UsageError(reads)
    before = order[: order.index(norm)]
    last = next((n for n in reversed(before) if n in linear and linear[n].bias is not None), None)
    shift = torch.linspace(-1, 1, width).to(modules[norm].bias) * 100
    with torch.no_grad():
        modules[norm].weight.zero_()
        modules[norm].bias.copy_(shift)
        if last is not None:
            modules[last].bias += shift
    moved, _ = _inputs(twin, image_shape, [norm, layer])
    if not torch.allclose(moved[layer], shift.expand_as(moved[layer]), rtol=1e-3, atol=1e-3):
        raise UsageError(reads)
    if last is None or not torch.allclose(moved[norm] - inputs[norm], shift.expand_as(moved[norm]), atol=1e-2):
        raise UsageError(
            f"no linear layer's output is added to what {norm} reads, so that it cannot be set for fishing"
        )
    return TrunkEnd(norm, last)


def _inputs(
    model: nn.Module, image_shape: tuple[int, int, int], names: list[str]
) -> tuple[dict[str, Tensor], list[str]]:
    """The inputs of some modules in a pass on a grey image, and the modules' names in the order of their calls."""
    found: dict[str, Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        """A hook that keeps the input of the module of that name."""
        return lambda _, given: found.__setitem__(name, given[0].detach().clone())

    handles = [model.get_submodule(name).register_forward_pre_hook(note(name)) for name in names]
    like = next(model.parameters())
    with torch.no_grad():
        model(torch.zeros(1, *image_shape, dtype=like.dtype, device=like.device))
    for handle in handles:
        handle.remove()
    return found, list(found)
