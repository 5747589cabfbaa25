"""What later attacks need of an update once its round is over.

Attacks over several rounds use of an old update only the gradients of patch projection and position embeddings, and of
the model only the parameters of its tokenizer and of its localisation loss. That is 2 % of a DeiT-S, so that a server
can keep the updates of many rounds.
"""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import nn

from attacks.observation import Observation
from attacks.tokenizer import Tokenizer, find_tokenizer


def remember(observation: Observation) -> Observation:
    """The observation without what attacks on later updates do not use.

    Raises:
        UsageError: the model is no ViT.
    """
    tokenizer = find_tokenizer(observation.model, observation.image_shape)
    kept = {tokenizer.weight, tokenizer.bias, tokenizer.positions, tokenizer.shared_position}
    # Copies: a gradient may be a view of the whole message, which would live on as long as the view.
    gradients = {n: g.clone() for n, g in observation.gradients.items() if n in kept}
    return replace(observation, gradients=gradients, model=front(observation.model, tokenizer))


def front(model: nn.Module, tokenizer: Tokenizer) -> nn.Module:
    """The model with its own parameters, and of its submodules only those of tokenizer and localisation loss.

    It cannot be run; parameters keep their names. Tensors are shared with `model`.
    """
    twin = copy.copy(model)
    parameters = (tokenizer.weight, tokenizer.positions, tokenizer.shared_position)
    kept = {tokenizer.localisation, *(name.split(".")[0] for name in parameters if name)}
    twin._modules = {n: m for n, m in model._modules.items() if n in kept}
    return twin
