"""The linear layer at the end of a model, its gradient, and how many tokens it was applied to.

A head y_i = W h_i + b that is applied to tokens i = 1 ... n sends, with d_i = dL/dy_i,

    dL/dW = sum_i d_i h_i^T,    dL/db = sum_i d_i,

so that [dL/dW, dL/db] has rank min(n, K, D + 1) wherever the d_i are independent. A class head reads one token: rank
one. A dense head (places of patches, classes of pixels, pixels themselves) reads many, and what singles them out has to
come from what is known of the d_i.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from attacks.linear.input_spans import count_inputs
from attacks.linear.position_rows import unmet_assumptions
from attacks.observation import Observation
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer

# Least share of the places that the head must have been asked for: copies of a patch lower the rank of its gradient.
LEAST_ASKED = 0.75


@dataclass(frozen=True)
class DenseHead:
    """A linear head as sent, and its gradient, all float64.

    Attributes:
        name: of the layer.
        weight, bias: W, (K, D), and b, (K,).
        weight_gradient, bias_gradient: of the same shapes.
        rank: of the gradient [dL/dW, dL/db], above the round-off of the message.
    """

    name: str
    weight: Tensor
    bias: Tensor
    weight_gradient: Tensor
    bias_gradient: Tensor
    rank: int


def find_dense_head(observation: Observation) -> DenseHead:
    """The last linear layer, or 1 x 1 convolution, of the model.

    Raises:
        UsageError: there is none, it has no bias, its gradient is not in the update, or it was applied to one token.
    """
    found = [name for name, module in observation.model.named_modules() if _is_linear(module)]
    if not found:
        raise UsageError(f"{type(observation.model).__name__} has no linear layer, so there is no head to read")
    name = found[-1]
    layer = observation.model.get_submodule(name)
    if layer.bias is None:
        raise UsageError(f"the head {name} has no bias, whose gradient says how much each of its rows was asked for")
    weight, bias = (observation.gradient_of(f"{name}.{part}") for part in ("weight", "bias"))
    if not (weight.any() and bias.any()):
        raise UsageError(f"the gradient of the head {name} is zero everywhere, so there is nothing to solve with")
    flat = weight.flatten(1).double()
    rank = count_inputs(flat, weight.dtype)
    if rank == 1 and observation.num_examples == 1:
        raise UsageError(f"the gradient of {name} has rank one: a head over one token of the image, not one a place")
    own = layer.weight.detach().flatten(1).double(), layer.bias.detach().double()
    return DenseHead(name, *own, flat, bias.double(), rank)


def find_place_head(observation: Observation, tokenizer: Tokenizer) -> DenseHead:
    """The head of an update of one image, whose rows are the places of the patches.

    Raises:
        UsageError: why it cannot be read.
    """
    reasons = unmet_assumptions(observation.num_examples, observation.local_steps)
    if reasons:
        raise UsageError("; ".join(reasons))
    head = observation.once(find_dense_head)
    rows, places = len(head.weight), tokenizer.num_patches
    if rows != places:
        raise UsageError(f"the head {head.name} has {rows} rows and the image {places} places: its rows are no places")
    most = min(places - 1, head.weight.shape[1])
    if head.rank < LEAST_ASKED * most:
        raise UsageError(
            f"the gradient of {head.name} has rank {head.rank} of {most}: it was asked for some places only, and which "
            "of its tokens belongs to which row is not known"
        )
    return head


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1)
