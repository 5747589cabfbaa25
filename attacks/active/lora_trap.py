"""A trap in low-rank terms: clients that send the gradients of LoRA's factors alone send r patches a block.

A factor A has no units to switch: y = W x + s B A x on the layer of queries, keys and values sends

    dL/dA = s B^T sum_t delta_t x_t^T,    x_t the tokens behind the norm, delta_t the gradient of y_t,

r rows in the span of all tokens. The server lets r tokens alone have a gradient there. B is zero for queries and keys,
and the attention is one-hot: every token attends to one of r places, chosen by its own place modulo r, with a softmax
that is saturated, so that the values of these places alone are used. The tokens carry codes of their places and of the
remainders (`attacks.active.token_codes`), and the r columns of the remainders in dL/dA = C X are C, up to each token's
scale: X = C^-1 dL/dA are the r tokens. W is zero for the values, A is zero and the MLP adds nothing, so that every
block sees the tokens of the patch embedding. The last two blocks stay as they are: their MLP and attention give tokens
the different gradients without which C has no inverse.

That reads r (L - 2) patches a round of L blocks, the others in the next prepared rounds. PEFTLeak (Sami et al. 2025)
traps adapters; that LoRA's factors can be read through a one-hot attention is ours. `lora_span` is the honest server's
attack on the same update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from attacks.active.base import SendContext, Sending
from attacks.active.blocks import Block, blocks_of, plain_norms, zeros_in
from attacks.active.token_codes import CODES, COSINE, SINE, TokenCodes, codes_for
from attacks.active.token_trap import Picked, TokenTrap
from attacks.linear.completion import VOUCHED_DEVIATION
from attacks.observation import Observation

# Least distance of the score of a place from that of its neighbours: exp(-SATURATED) is nothing in float32.
SATURATED = 120.0
# Factor on the errors that the angles of a block's tokens show: they are a few numbers.
CAUTION = 2.0


@dataclass(frozen=True, kw_only=True)
class LoRATrap(TokenTrap):
    """The image of a client that sends LoRA's factors alone."""

    updates_wanted: ClassVar[int] = 2  # of rank 8 in four blocks: 64 patches
    left: ClassVar[int] = 2
    kind: ClassVar[str] = "low-rank terms (LoRA) in the attentions"

    def send(self, context: SendContext) -> Sending:
        """See `ActiveAttack.send`: tokens, and the blocks but the last two.

        Raises:
            UsageError: the model's attention has no low-rank terms, or it is no plain ViT.
        """
        layers = self.trapped(context.model)
        codes = self.codes_for(context.model, context.image_shape)
        blocks = blocks_of(context.model, codes.tokenizer.width)[: len(layers)]
        slots = -(-codes.tokenizer.num_patches // codes.remainders)
        before = sum(len(self.slots(one, codes)) for one in context.history if self._is_prepared(one, codes))
        parameters = codes.parameters(context.model)
        for number, (block, layer) in enumerate(zip(blocks, layers, strict=True)):
            parameters |= attends_to(context.model, block, layer, codes, (before + number) % slots)
        return Sending(parameters)

    def trained_layers(self, model: nn.Module) -> list[str]:
        """See `TokenTrap.trained_layers`: the fused attentions with low-rank terms."""
        return [n for n, module in model.named_modules() if n.endswith("attn.qkv") and hasattr(module, "lora_A")]

    def codes_for(self, model: nn.Module, image_shape: tuple[int, int, int]) -> TokenCodes:
        """See `TokenTrap.codes_for`: with a code of the place modulo the rank."""
        rank = len(model.get_submodule(self.trapped(model)[0]).lora_A)
        return codes_for(model, image_shape, rank)

    def slots(self, observation: Observation, codes: TokenCodes) -> list[int]:
        """The slots of r places that a prepared update's blocks attend to; [] of an update that was not prepared."""
        found = []
        for layer in self.trapped(observation.model):
            cosine, sine = observation.model.get_submodule(layer).weight.detach()[:2, CODES].double().tolist()
            if not math.hypot(cosine, sine) > 1:
                return []
            place = round(math.atan2(sine, cosine) / (2 * math.pi) * codes.tokenizer.num_patches)
            found.append(place % codes.tokenizer.num_patches // codes.remainders)
        return found

    def places(self, observation: Observation, codes: TokenCodes) -> Tensor:
        """See `TokenTrap.places`."""
        slots = self.slots(observation, codes)
        return torch.cat([places_of(slot, codes) for slot in slots]) if slots else torch.zeros(0, dtype=torch.int64)

    def picked(self, observation: Observation, codes: TokenCodes) -> Picked:
        """See `TokenTrap.picked`."""
        found = []
        for layer, slot in zip(self.trapped(observation.model), self.slots(observation, codes), strict=True):
            gradient = observation.gradient_of(f"{layer}.lora_A").double()
            places = places_of(slot, codes).to(gradient.device)
            columns = torch.zeros(len(places), codes.tokenizer.width, dtype=torch.float64)
            columns[torch.arange(len(places)), CODES + torch.arange(len(places))] = 1.0
            mixing = gradient @ codes.balanced(columns, torch.zeros(len(places)).double()).T.to(gradient)  # (r, n)
            if not mixing.any():
                continue
            inverse = torch.linalg.pinv(mixing)  # (n, r)
            tokens = inverse @ gradient  # (n, D)
            errors = errors_of(codes, tokens, places, inverse)
            found.append(Picked(places, tokens, CAUTION * max(observation.std) * errors < VOUCHED_DEVIATION))
        return Picked.join(found, observation.gradient_of(f"{self.trapped(observation.model)[0]}.lora_A"))


def errors_of(codes: TokenCodes, tokens: Tensor, places: Tensor, inverse: Tensor) -> Tensor:
    """Standard deviation of a normalised pixel of each token's patch, (n,); NaN where no token is readable.

    An error of the same size in every entry of C X becomes one in proportion to the rows of C^-1. Its size is what the
    angles of all tokens of the block show: they stand in channels that C was not read from.

    Args:
        tokens: X, (n, D) float64 after the norm.
        places: (n,) int64.
        inverse: C^-1, (n, r).
    """
    readable, gains = codes.readable(tokens), inverse.norm(dim=1)
    shown = codes.misses(tokens[readable], places[readable]) / gains[readable, None]
    return gains * shown.square().mean().sqrt()


def places_of(slot: int, codes: TokenCodes) -> Tensor:
    """The places of a slot, (n,) int64: r of them, fewer in the last one."""
    first = slot * codes.remainders
    return torch.arange(first, min(first + codes.remainders, codes.tokenizer.num_patches))


def attends_to(model: nn.Module, block: Block, layer: str, codes: TokenCodes, slot: int) -> dict[str, Tensor]:
    """A block whose tokens attend to the places of a slot, by remainder, and which adds nothing to them, by name."""
    t, attention = codes.tokenizer, model.get_submodule(layer.rpartition(".")[0])
    found = zeros_in(model, layer, block.output, block.second) | plain_norms(model, block.norm)
    places = places_of(slot, codes)
    angle = codes.angles()[places[torch.arange(codes.remainders) % len(places)]]  # (r,)
    queries, keys = torch.zeros(2, 3, t.width, dtype=torch.float64)
    queries[0, CODES : CODES + codes.remainders], queries[1, CODES : CODES + codes.remainders] = (
        angle.cos(),
        angle.sin(),
    )
    keys[0, COSINE], keys[1, SINE] = 1.0, 1.0
    constant = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    queries, keys = codes.balanced(queries, -constant), codes.balanced(keys, constant)
    size = t.width // attention.num_heads
    # a^2 / sigma^2 is D / 4: two constants, an angle and a remainder.
    strength = SATURATED * size**0.5 / (codes.gap * t.width / 4)
    weight = found[f"{layer}.weight"]
    for head in range(attention.num_heads):
        weight[head * size : head * size + 3] = (strength * queries).to(weight)
        weight[t.width + head * size : t.width + head * size + 3] = keys.to(weight)
    generator = torch.Generator().manual_seed(0)
    factor, output = found[f"{layer}.lora_B"], found[f"{block.output}.weight"]
    factor[2 * t.width :] = torch.linalg.qr(torch.randn(t.width, factor.shape[1], generator=generator))[0].to(factor)
    output[:] = torch.linalg.qr(torch.randn(output.shape, generator=generator))[0].to(output)
    return found
