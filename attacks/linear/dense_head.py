"""The linear layer at the end of a model, its gradient, and how many tokens it was applied to.

A head y_i = W h_i + b that is applied to tokens i = 1 ... n sends, with d_i = dL/dy_i,

    dL/dW = sum_i d_i h_i^T,    dL/db = sum_i d_i,

so that [dL/dW, dL/db] has rank min(n, K, D + 1) wherever the d_i are independent. A class head reads one token: rank
one. A dense head (places of patches, classes of pixels, pixels themselves) reads many, and what singles them out has to
come from what is known of the d_i. `Rows` describes a kind of head by what a row of it means:

- `PLACES`: row i is the place of token i, so d_i = softmax(y_i) - e_i (`attacks.heads.place_rows`);
- `VALUES`: row k is the k-th pixel of a patch under an L1 loss, so d_ik = +-c (`attacks.heads.sign_tokens`);
- classes of pixels are neither: d_i holds the labels of the token's pixels, which are not known, and K classes give K
  (D + 1) numbers for N D of features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from attacks.linear.input_spans import count_inputs
from attacks.linear.position_rows import unmet_assumptions
from attacks.observation import Observation
from attacks.registry import UsageError
from attacks.tokenizer import LOCALISATION, RELEASED_LOCALISATION, Tokenizer

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
        UsageError: there is none, it is of MJP's localisation term, it has no bias, its gradient is not in the update,
            or it was applied to one token.
    """
    found = [name for name, module in observation.model.named_modules() if _is_linear(module)]
    if not found:
        raise UsageError(f"{type(observation.model).__name__} has no linear layer, so there is no head to read")
    name = found[-1]
    if name.partition(".")[0] in (LOCALISATION, RELEASED_LOCALISATION):
        raise UsageError(
            f"the last linear layer, {name}, is of MJP's localisation term, a regression of the two coordinates of a "
            "place from its position embedding: it has no row for each place, and its gradient holds no token of the "
            "image"
        )
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


@dataclass(frozen=True)
class Rows:
    """What the rows of a dense head are, and so what its loss is known to be at a token.

    Attributes:
        words: of the rows.
        count: K for a tokenizer.
        images: most images of an update that the head can be read of; None for any number.
        unread: why the gradient of such a head over so many tokens does not say what they are, or "".
    """

    words: str
    count: Callable[[Tokenizer], int]
    images: int | None
    unread: Callable[[DenseHead, int], str]

    def find(self, observation: Observation, tokenizer: Tokenizer) -> DenseHead:
        """The head of an update, which has such rows.

        Raises:
            UsageError: why it cannot be read.
        """
        examples = observation.num_examples if self.images is not None else 1
        reasons = unmet_assumptions(examples, observation.local_steps)
        if reasons:
            raise UsageError("; ".join(reasons))
        head = observation.once(find_dense_head)
        rows, wanted = len(head.weight), self.count(tokenizer)
        if rows != wanted:
            raise UsageError(
                f"the head {head.name} has {rows} rows, and there are {wanted} {self.words}: its rows are none of them "
                "(of a head of classes, what its loss is at a token depends on labels that the server does not have)"
            )
        reason = self.unread(head, observation.num_examples * tokenizer.num_patches)
        if reason:
            raise UsageError(reason)
        return head


def _some_places(head: DenseHead, tokens: int) -> str:
    most = min(tokens - 1, head.weight.shape[1])
    if head.rank >= LEAST_ASKED * most:
        return ""
    return (
        f"the gradient of {head.name} has rank {head.rank} of {most}: it was asked for some places only, and which "
        "of its tokens belongs to which row is not known"
    )


def _too_many_tokens(head: DenseHead, tokens: int) -> str:
    rows, width = head.weight.shape
    if tokens >= min(rows, width):
        return (
            f"the gradient of {head.name} is a sum over {tokens} tokens, which must be fewer than its {rows} rows and "
            f"{width} channels: {rows} x {width} numbers would hold {tokens} x {width} of features and "
            f"{tokens} x {rows} signs"
        )
    if head.rank < tokens:
        return (
            f"the gradient of {head.name} has rank {head.rank} and was summed over {tokens} tokens: the derivatives of "
            f"{tokens - head.rank} are combinations of others' (uniform patches), and cannot be separated from them"
        )
    return ""


PLACES = Rows("places of the patches", lambda tokenizer: tokenizer.num_patches, 1, _some_places)
VALUES = Rows("values of a patch", lambda tokenizer: tokenizer.patch_dim, None, _too_many_tokens)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1)
