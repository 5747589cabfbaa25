"""A trap in adapters: clients that send the gradients of adapters alone send their patches, one a hidden unit.

Sami et al. 2025, "Gradient Inversion Attacks on Parameter-Efficient Fine-Tuning" (PEFTLeak), for what
`fedmjp.models.adapters` builds: an adapter behind each block's MLP. In every block but the last the attention adds
nothing, and the MLP returns its input n = LN(z): its hidden units are kept where GELU is the identity. The residual sum
z + n has the same norm output n again, so that all adapters see the tokens of the patch embedding. A unit of an adapter
is switched on by the token at one place: the gradient of its row over that of its bias is that token, and the token is
the patch. The last block stays as it is; through its attention the tokens have a gradient at all.

An adapter of r units in each of L blocks reads r (L - 1) patches a round. Where an image has more, the next prepared
round reads the next ones.

Departs from the paper, whose units have random directions and bins calibrated by public data: places need neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from attacks.active.base import SendContext, Sending
from attacks.active.bins import read_bins, round_off
from attacks.active.blocks import Block, blocks_of, plain_norms, same_direction, zeros_in
from attacks.active.token_codes import COSINE, MIXED, SINE, STEEPNESS, WRITTEN, TokenCodes, codes_for
from attacks.active.token_trap import Picked, TokenTrap
from attacks.observation import Observation

# Bias of the hidden units that return their input, which lies within +-10 there: GELU(x + 20) = x + 20 in float32.
LINEAR = 20.0
READS, WRITES = "adapter.down", "adapter.up"


@dataclass(frozen=True, kw_only=True)
class AdapterTrap(TokenTrap):
    """The image of a client that sends adapters alone."""

    left: ClassVar[int] = 1
    kind: ClassVar[str] = "adapters behind the MLPs"

    def send(self, context: SendContext) -> Sending:
        """See `ActiveAttack.send`: tokens, the blocks but the last, and their adapters.

        Raises:
            UsageError: the model has no adapters behind the MLPs of its blocks, or is no plain ViT.
        """
        codes, layers = codes_for(context.model, context.image_shape), self.trapped(context.model)
        blocks = blocks_of(context.model, codes.tokenizer.width)[:-1]
        units = context.model.get_submodule(layers[0]).out_features
        parameters = codes.parameters(context.model)
        before = sum(len(self.places(one, codes)) for one in context.history if self._is_prepared(one, codes))
        count = min(units * len(layers), codes.tokenizer.num_patches)
        places = (before + torch.arange(count)) % codes.tokenizer.num_patches
        for number, (block, layer) in enumerate(zip(blocks, layers, strict=True)):
            own = places[number * units : (number + 1) * units]
            parameters |= hands_on(context.model, block) | picks(context.model, layer, codes, own)
        return Sending(parameters)

    def trained_layers(self, model: nn.Module) -> list[str]:
        """See `TokenTrap.trained_layers`: the first layers of the adapters."""
        return [name for name, module in model.named_modules() if name.endswith(READS)]

    def places(self, observation: Observation, codes: TokenCodes) -> Tensor:
        """See `TokenTrap.places`: by the angles of the units that are set."""
        return _places(_rows(observation.model, self.trapped(observation.model)), codes)[1]

    def picked(self, observation: Observation, codes: TokenCodes) -> Picked:
        """See `TokenTrap.picked`."""
        layers = self.trapped(observation.model)
        units, places = _places(_rows(observation.model, layers), codes)
        weight, bias = (
            torch.cat([observation.gradient_of(f"{layer}.{part}") for layer in layers])[units]
            for part in ("weight", "bias")
        )
        least = max(round_off(observation, f"{layer}.bias") for layer in layers)
        found = read_bins(weight[:, None], bias[:, None], least)
        alone = codes.spread(found.inputs).abs() <= MIXED
        return Picked(places.to(found.places.device)[found.places], found.inputs, alone)


def hands_on(model: nn.Module, block: Block) -> dict[str, Tensor]:
    """A block whose attention adds nothing and whose MLP returns its input, by name of the parameter."""
    found = zeros_in(model, block.output, block.first, block.second) | plain_norms(model, block.mlp_norm)
    first, second = found[f"{block.first}.weight"], found[f"{block.second}.weight"]
    width = len(second)
    there = torch.arange(width)
    first[there, there], second[there, there] = 1.0, 1.0
    found[f"{block.first}.bias"][:width] = LINEAR
    found[f"{block.second}.bias"][:] = -LINEAR
    return found


def picks(model: nn.Module, layer: str, codes: TokenCodes, places: Tensor) -> dict[str, Tensor]:
    """An adapter with a unit for each place, and others that are never switched on, by name of the parameter."""
    up = f"{layer.removesuffix(READS)}{WRITES}"
    found = zeros_in(model, layer, up)
    rows = 2 / codes.gap * codes.at_places(places)  # a (1, and -1 or less elsewhere) with a added
    rows = rows + codes.balanced(torch.zeros_like(rows), torch.ones(len(places), dtype=torch.float64))
    found[f"{layer}.weight"][: len(places)] = STEEPNESS * rows.to(found[f"{layer}.weight"])
    found[f"{up}.weight"] = same_direction(found[f"{up}.weight"], WRITTEN)
    return found


def _rows(model: nn.Module, layers: Sequence[str]) -> Tensor:
    """The weights of the adapters' units, (units, D)."""
    return torch.cat([model.get_submodule(layer).weight.detach() for layer in layers])


def _places(rows: Tensor, codes: TokenCodes) -> tuple[Tensor, Tensor]:
    """The units that are set for a place, (n,) int64, and their places, (n,) int64."""
    units = (rows[:, [COSINE, SINE]].norm(dim=1) > STEEPNESS).nonzero()[:, 0]
    angles = torch.atan2(rows[units, SINE], rows[units, COSINE]).double()
    turns = angles / (2 * math.pi) * codes.tokenizer.num_patches
    return units, turns.round().long() % codes.tokenizer.num_patches
