"""Whether an update holds more than round-off where the patch projection's bias, which would show it, was not sent.

Every token's gradient is in one position row and in dL/db, so that their difference shows what else an update holds
(`attacks.linear.position_rows`). Models without that bias (CLIP) and clients that freeze or withhold it leave two other
places to look:

*Spare equations.* G^T X = dL/dE has D equations for N rows. With more channels than patches, seen and hidden, what no
rows explain is error (`attacks.linear.least_squares`): on float32 1.0e-7 to 1.3e-7 of the rms entry of dL/dE, with
noise of 1e-6 of an update's rms entry 4e-6 to 1.3e-5, of 3e-6 1e-5 to 4e-5, about what the bias shows.

*The first attention.* Behind a layer norm with weights gamma and biases beta the inputs n of queries, keys and values
fulfil

    sum_c (n_c - beta_c) / gamma_c = 0,

whatever the tokens are. So the rows of [dL/dW_qkv, dL/db_qkv] span at most D of their D + 1 columns, however many
tokens there are, and what they hold beyond is error (`attacks.linear.input_spans`). Neither gamma nor beta need be
known. It takes the gradients of weights and biases.

Where neither is possible nothing shows whether a client has added noise.
"""

from __future__ import annotations

from torch import Tensor, nn

from attacks.attention import find_first_attention
from attacks.linear.input_spans import attention_gradient, span_of_inputs
from attacks.linear.least_squares import solve_rows
from attacks.observation import Observation
from attacks.registry import UsageError

# Share of the rms entry of dL/dE above which its error is more than the round-off of float32.
NOISY = 1e-5


def noise_without_bias(observation: Observation, rows: Tensor, products: Tensor, hidden: int) -> bool | None:
    """Whether an update holds more than the round-off of float32; None where nothing shows it.

    Args:
        rows: G, (U, D), of the visible patches.
        products: dL/dE, (D, P), or with further columns of the same equations.
        hidden: patches that the model saw and whose rows are not in G.
    """
    visible, width = rows.shape
    if width > visible + hidden and products.shape[1] > hidden:
        solution = solve_rows(rows[None], products[None], hidden=hidden)[0]
        return bool(solution.noise > NOISY * products.square().mean().sqrt())
    return _noise_of_attention(observation, width)


def _noise_of_attention(observation: Observation, width: int) -> bool | None:
    """The same by the first attention; None where it has no layer norm before it, or not all of it was sent."""
    try:
        attention = find_first_attention(observation.model, width)
    except UsageError:
        return None
    norm = attention.norm and observation.model.get_submodule(attention.norm)
    if not isinstance(norm, nn.LayerNorm) or not all(name in observation.gradients for name in attention.weights):
        return None
    gradient = attention_gradient(observation, attention)
    if gradient.shape[1] == width or not gradient[:, -1].any():
        return None
    return span_of_inputs(gradient, width, gradient.dtype).added
