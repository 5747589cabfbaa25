"""What later attacks need of an update once its round is over.

Attacks over several rounds use of an old update only the gradients of patch projection and position embeddings, and of
the model only the parameters of its tokenizer and of its localisation loss. That is 2 % of a DeiT-S, so that a server
can keep the updates of many rounds. Where the position gradient is withheld, they use the first attention's instead,
and the norm before it (`attacks.closed_form.token_equations`).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import replace

from torch import nn

from attacks.attention import find_first_attention, input_factor
from attacks.linear.input_spans import bias_of
from attacks.linear.position_rows import position_gradient
from attacks.observation import Observation
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer, find_tokenizer


def remember(observation: Observation, layers: Collection[str] = ()) -> Observation:
    """The observation without what attacks on later updates do not use.

    Args:
        layers: further layers to keep, weights and gradients, by name (`Attack.remembered_layers`).

    Raises:
        UsageError: the model is no ViT.
    """
    tokenizer = find_tokenizer(observation.model, observation.image_shape)
    kept = {tokenizer.weight, tokenizer.bias, tokenizer.positions, tokenizer.shared_position}
    sent = tokenizer.positions is None or position_gradient(observation, tokenizer) is not None
    spans = () if sent else _first_attention(observation.model, tokenizer.width)
    kept |= {name for weight in spans for name in (weight, bias_of(weight), input_factor(observation.model, weight))}
    if tokenizer.localisation is not None and not _balanced(observation, tokenizer):
        kept |= {name for name in observation.gradients if name.startswith(f"{tokenizer.localisation}.")}
    kept |= {f"{layer}.{part}" for layer in layers for part in ("weight", "bias", "lora_A")}
    # Copies: a gradient may be a view of the whole message, which would live on as long as the view.
    gradients = {n: g.clone() for n, g in observation.gradients.items() if n in kept}
    bounds = {n: b.clone() for n, b in observation.bounds.items() if n in kept}
    model = front(observation.model, tokenizer, spans=bool(spans), layers=layers)
    return replace(observation, gradients=gradients, bounds=bounds, model=model)


def front(model: nn.Module, tokenizer: Tokenizer, *, spans: bool = False, layers: Collection[str] = ()) -> nn.Module:
    """The model with the modules that hold the tokenizer's parameters, and with its localisation loss.

    It cannot be run; parameters keep their names. Tensors are shared with `model`.

    Args:
        spans: keep the norms and the attention of the first block as well.
        layers: names of further submodules to keep.
    """
    parameters = (tokenizer.weight, tokenizer.positions, tokenizer.shared_position)
    kept = {tokenizer.localisation, *parameters, *layers} - {None}
    if spans:
        attention = find_first_attention(model, tokenizer.width)
        kept |= {name.rpartition(".")[0] for name in attention.weights}
        kept |= {norm for norm in (attention.norm, attention.mlp_norm) if norm}
    return _pruned(model, kept)


def _balanced(observation: Observation, tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer's gradients alone show a localisation loss (`attacks.linear.position_rows`)."""
    needed = (tokenizer.bias, tokenizer.shared_position)
    return all(name is None or name in observation.gradients for name in needed)


def _first_attention(model: nn.Module, width: int) -> tuple[str, ...]:
    """Names of the first attention's weights; () without one."""
    try:
        return find_first_attention(model, width).weights
    except UsageError:
        return ()


def _pruned(module: nn.Module, kept: Collection[str]) -> nn.Module:
    """The module with its own parameters and those of its submodules alone that `kept` names, or a parameter of them.

    A submodule that is named itself is whole; the others lose hooks, which would keep what they call.
    """
    twin, children = copy.copy(module), dict[str, nn.Module]()
    twin._forward_pre_hooks = OrderedDict()
    for name, child in module._modules.items():
        below = {path.partition(".")[2] for path in kept if path.partition(".")[0] == name}
        if below:
            children[name] = child if "" in below else _pruned(child, below)
    twin._modules = children
    return twin
