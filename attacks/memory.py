"""What is worth keeping of an update once its round is over.

Attacks over several rounds read an old update where the tokens are made and nowhere else: the gradients of patch
projection and position embeddings, and of the model what makes tokens and what its localisation loss reads. That is 2 %
of a DeiT-S, so that a server can keep the updates of many rounds.
"""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import nn

from attacks.observation import Observation
from attacks.tokenizer import find_tokenizer


def remember(observation: Observation) -> Observation:
    """The observation without what attacks on later updates have no use for.

    Raises:
        UsageError: the model is no ViT.
    """
    tokenizer = find_tokenizer(observation.model, observation.image_shape)
    shared = {n for n, g in observation.gradients.items() if "unk" in n.lower() and g.numel() == tokenizer.width}
    kept = {tokenizer.weight, tokenizer.bias, tokenizer.positions} | shared
    # Copies: a gradient may be a view of the whole message, which would live on as long as the view.
    gradients = {n: g.clone() for n, g in observation.gradients.items() if n in kept}
    return replace(observation, gradients=gradients, model=front(observation.model, tokenizer.weight))


def front(model: nn.Module, projection: str) -> nn.Module:
    """The model with its own parameters, and of its parts only the one that holds `projection`, and `dal`.

    It cannot be run; parameters keep their names. Tensors are shared with `model`.
    """
    twin = copy.copy(model)
    twin._modules = {n: m for n, m in model._modules.items() if n in (projection.split(".")[0], "dal")}
    return twin
