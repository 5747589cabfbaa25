"""MJP's localisation loss (dense absolute localisation, its equation 4) as it stands in an update.

The loss depends on the position embedding, the head that reads places from it, and the mask: all of them were sent, or
are read from the update. Its gradient is computed from the sent model, with respect to the positions, to be subtracted
there, and with respect to the head's parameters: no other loss reaches those, so that they hold the loss' weight lambda
where nothing else of the update does.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from attacks.observation import Observation
from attacks.tokenizer import RELEASED_LOCALISATION, Tokenizer

# Share of the head's gradient that may be something else than the loss' (noise, few digits).
LARGEST_REST = 0.1


def localisation_gradient(observation: Observation, tokenizer: Tokenizer, masked: Tensor) -> Tensor:
    """d, (N, D) float64: gradient of the sent model's localisation loss with respect to the patches' positions."""
    return _gradients(observation, tokenizer, masked)[0]


def weight_by_head(observation: Observation, tokenizer: Tokenizer, masked: Tensor) -> float | None:
    """lambda by the gradient of the head's parameters.

    None where it does not show: the head has no parameters, or the gradient of one was not sent or is another one.

    Args:
        masked: (N,) bool.
    """
    head = observation.model.get_submodule(tokenizer.localisation)
    names = [name for name, _ in head.named_parameters()]
    found = [observation.gradients.get(f"{tokenizer.localisation}.{name}") for name in names]
    if not found or any(gradient is None for gradient in found):
        return None
    sent = torch.cat([gradient.double().flatten() for gradient in found])
    if not sent.any():
        return 0.0
    own = _gradients(observation, tokenizer, masked)[1]
    expected = torch.cat([own[name].double().flatten() for name in names])
    weight = float(sent @ expected / expected.square().sum())
    return weight if (sent - weight * expected).norm() <= LARGEST_REST * sent.norm() else None


def _gradients(observation: Observation, tokenizer: Tokenizer, masked: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Of the loss: of the patches' positions, (N, D) float64, and by name of the head's parameters."""
    table = tokenizer.position_rows(dict(observation.model.named_parameters())).detach()
    head = observation.model.get_submodule(tokenizer.localisation)
    own = {name: p.detach().clone().requires_grad_() for name, p in head.named_parameters()}
    with torch.enable_grad():
        positions = table[tokenizer.prefix :].clone().requires_grad_(True)
        if tokenizer.localisation == RELEASED_LOCALISATION:
            tokens = torch.cat([table[: tokenizer.prefix], positions])[None]
            places, predicted = functional_call(head, own, (tokens, (~masked)[None].long()))
            loss = (places - predicted).abs().mean()
        else:
            loss = functional_call(head, own, (positions, tokenizer.grid, masked[None]))
        found = torch.autograd.grad(loss, [positions, *own.values()], allow_unused=True, materialize_grads=True)
    return found[0].to(torch.float64), dict(zip(own, found[1:], strict=True))
