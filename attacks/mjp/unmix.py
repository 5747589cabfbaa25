"""The whole image from one update with masked positions: every token from the first MLP, then its patch and its place.

`attacks.linear.masked_update` says beforehand which positions are masked, and what the visible patches are up to a
subspace. Where that is everything, because more patches are masked than one has values, all patches are searched as on
a model without positions; the tokens of visible ones bear their place. `attacks.mjp.mlp_tokens` finds what each token
brings to the first MLP, one token at a time, from that MLP's gradients; `attacks.mjp.token_patches` solves linear
equations for the patches and says which place a token has; `attacks.mjp.known_attention` refines the patches with the
attention that they have, and where few are masked it finds all of them without the tokens. The masked patches share one
embedding, so nothing in the update says in which order they are: `attacks.mjp.placement` places them by their borders,
and where the adversary has public photographs by a learned predictor too.

Where the position gradient is withheld, the spans of the first attention's gradient say which positions are masked
(`attacks.mjp.span_update`). Where that is withheld, too, the tokens alone do, masked or not: each one's equations hold
with the embedding that it bears.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from attacks.attention import name_of_block
from attacks.linear.completion import VOUCHED_DEVIATION, above_noise, render
from attacks.linear.image_prior import VectorialVariation
from attacks.linear.intervals import COARSE, coarseness
from attacks.linear.normal_equations import Estimate
from attacks.linear.position_rows import PositionRows, position_gradient, unmet_assumptions, unseen_noise
from attacks.mjp.attended_tokens import AttendedSearch
from attacks.mjp.joined_updates import (
    JoinedUpdates,
    join_updates,
    nothing_masked,
    read_update,
    updates_of_last_image,
)
from attacks.mjp.known_attention import PatchSweeps, SweepSearch
from attacks.mjp.mlp_spans import LAYERS, read_first_block
from attacks.mjp.mlp_tokens import TokenFamily, cone
from attacks.mjp.open_attention import OpenAttention
from attacks.mjp.patch_search import (
    FARTHEST,
    NO_TOKEN,
    Searches,
    from_sweeps,
    near_guess,
    of_tokens,
    seen_enough,
    unmixed,
    within,
)
from attacks.mjp.placement import Placement, PlacingAttack
from attacks.mjp.shown_attention import ShownAttention
from attacks.mjp.span_update import SpanUpdate
from attacks.mjp.token_patches import KnownPatches, PlacedPatches, known_span, masked_by_tokens
from attacks.mjp.token_search import TokenSearch
from attacks.observation import ORDER_GUESSED, Capability, Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer, find_tokenizer

# Seconds of one CPU core: of the search of all tokens, by tokens squared and entries of the hidden layer; of the search
# beside seen ones, by patches, unseen ones, and the same entries; of the placement, by pieces squared.
SECONDS_OF_A_PAIR, SECONDS_OF_AN_UNSEEN_PAIR, SECONDS_OF_A_PLACE = 7e-7, 1e-6, 8e-4
# Of the random starts of patches that no update shows, beside seen ones, on the small models.
SECONDS_OF_STARTS = 0.9
# Weights of the first attention's layer whose gradient stands in for the position rows.
QUERIES = "attn.qkv"
# Pixels of a photograph lie in [0, 1]; this far outside they are none, even where other means and deviations than the
# model's were given.
MARGIN = 2.0
# Where tokens alone say which patch is where, and in rounded or noisy messages, errors are up to so many times those
# expected: measured on trained models of 32 and 64 pixels, in float16, bfloat16, int8 and with noise of 1e-4 to 1e-2.
TOKEN_ERROR = 20.0


@dataclass(frozen=True, kw_only=True)
class Unmix(PlacingAttack):
    """Whole image from one update with masked positions and the first block's weights and gradients.

    Attributes:
        search: for the tokens.
        attend: for the patches, with the attention of each in a span.
        shown: for the patches that are missing then, from the attention that the others show.
        opened: for the patches while some are wrong yet, with attention open.
        sweep: for the patches, with known attention.
        prior: gives the start of the search.
    """

    search: TokenSearch = field(default_factory=TokenSearch)
    attend: AttendedSearch = field(default_factory=AttendedSearch)
    shown: ShownAttention = field(default_factory=ShownAttention)
    opened: OpenAttention = field(default_factory=OpenAttention)
    sweep: SweepSearch = field(default_factory=SweepSearch)
    prior: VectorialVariation = field(default_factory=VectorialVariation)

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MODEL_WEIGHTS})
    # Whether updates without position gradient are read, by the spans of the first attention.
    reads_spans: ClassVar[bool] = True

    def linear_layers(self, model: nn.Module, width: int) -> tuple[str, ...]:
        """The layers of the first block whose spans are read."""
        return layers_of(model, (QUERIES, *LAYERS) if self.reads_spans else LAYERS)

    def obstacle(self, observations: Sequence[Observation]) -> str:
        """See `Attack.obstacle`."""
        alone = self._has_tokens_alone(observations[-1])
        return "" if alone else nothing_masked(observations[-1], spans=self.reads_spans)

    def estimated_seconds(self, observations: Sequence[Observation]) -> float:
        """See `Attack.estimated_seconds`: one search of all tokens and the placement of those that no update shows."""
        if self._has_tokens_alone(observations[-1]):
            tokenizer = find_tokenizer(observations[-1].model, observations[-1].image_shape)
            return seconds_of_search(observations[-1], tokenizer, tokenizer.num_patches * tokenizer.hides_positions)
        try:
            rows = self._updates_of_image(observations)
        except UsageError:
            return super().estimated_seconds(observations)
        unseen = int(torch.stack([r.masked for r in rows if r.masked.shape == rows[-1].masked.shape]).all(dim=0).sum())
        solves = super().estimated_seconds(observations) * len(rows)
        tokenizer = rows[-1].tokenizer
        if not seen_enough(unseen, tokenizer.num_patches):
            return solves + seconds_of_search(observations[-1], tokenizer, unseen)
        starts, rate = SECONDS_OF_STARTS if unseen else 0.0, SECONDS_OF_AN_UNSEEN_PAIR * unseen / tokenizer.num_patches
        return solves + starts + seconds_of_search(observations[-1], tokenizer, unseen, rate)

    def _updates_of_image(self, observations: Sequence[Observation]) -> Sequence[PositionRows | SpanUpdate]:
        used = self.updates(observations)
        return updates_of_last_image(used) if len(used) > 1 else [read_update(used[0], spans=self.reads_spans)]

    def updates(self, observations: Sequence[Observation]) -> Sequence[Observation]:
        """Those of a client's updates that the attack uses: the last one."""
        return observations[-1:]

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; vouches for patches whose token is found, but for those never shown.

        `details` holds the numbers of `known_patches`, and those of `unmixed`.
        """
        observation = observations[-1]
        if self._has_tokens_alone(observation):
            return self._from_tokens_alone(observation)
        joined = join_updates(self.updates(observations), spans=self.reads_spans)
        tokenizer = joined.tokenizer
        if position_gradient(observation, tokenizer) is None and not joined.last.masked.any():
            raise UsageError(nothing_masked(observation, spans=True))
        known, guess, details = self.known_patches(joined, observation)
        if not len(known.basis):
            sure = above_noise(joined.deviation, observation.std) & exact(known, observation)
            return render(observation, tokenizer, guess, sure, "; ".join(unseen_noise(joined.noisy)), details)
        try:
            block = read_first_block(observation, tokenizer)
        except UsageError as error:
            raise UsageError("; ".join([*joined.reasons, str(error)])) from error
        start = guess if known.apart else guess[:0]
        sweeps = PatchSweeps(block, known, pixel_limits(tokenizer, observation, guess.device))
        scales = pixel_scales(tokenizer, observation.std, guess.device)
        searches = Searches(self.search, self.sweep, self.attend, self.shown, self.opened)
        placed, numbers = unmixed(searches, sweeps, start, guess, scales)
        placed = near_guess(placed, guess, known.unseen, 0.0 if joined.last.mixed else FARTHEST)
        words = mask_in_words(joined.last.masked, sent=position_gradient(observation, tokenizer) is not None)
        return finished(observation, tokenizer, known, placed, guess, words, details | numbers, self.placement)

    def _has_tokens_alone(self, observation: Observation) -> bool:
        """Whether the update lacks the position gradient and what stands in for it, and not what tokens need."""
        if not self.reads_spans or observation.drops_patches or not observation.weights_granted:
            return False
        try:
            tokenizer = find_tokenizer(observation.model, observation.image_shape)
        except UsageError:
            return False
        if tokenizer.positions is None and tokenizer.fixed_positions is None:  # a case for `patch_set`
            return False
        if position_gradient(observation, tokenizer) is not None or observation.num_examples > 1:
            return False
        try:
            read_update(observation, spans=True)
        except UsageError:
            layers = (*layers_of(observation.model), tokenizer.weight, tokenizer.bias)
            return len(layers) == len(LAYERS) + 2 and all(name in observation.gradients for name in layers)
        return False

    def _from_tokens_alone(self, observation: Observation) -> Reconstruction:
        """The image where neither position rows nor the first attention's gradient were sent.

        The patches lie in the span that the projection's gradient gives, and each token's own equations tell which
        place's embedding it bears, or that it bears the shared one.
        """
        tokenizer = find_tokenizer(observation.model, observation.image_shape)
        reasons = unmet_assumptions(observation.num_examples, observation.local_steps)
        if reasons:
            raise UsageError("; ".join(reasons))
        block, known = read_first_block(observation, tokenizer), known_span(observation, tokenizer)
        scales = pixel_scales(tokenizer, observation.std, known.rows.device)
        tokens = self.search(block, known.rows[:0] @ block.projection.T)
        if not len(tokens):
            raise UsageError(NO_TOKEN)
        errors = TokenFamily(block, cone(block)).errors(tokens)
        masked = masked_by_tokens(block, known, scales, tokens.y, errors)
        known = replace(known, masked=masked, unseen=masked)
        sweeps = PatchSweeps(block, known, pixel_limits(tokenizer, observation, scales.device))
        placed, swept, numbers = of_tokens(tokens, self.sweep, sweeps, known.rows, scales)
        placed, details = (
            from_sweeps(sweeps, swept, scales).completed(within(placed, sweeps), masked),
            {"masked": int(masked.sum())} | numbers,
        )
        words = "the update holds neither the position gradient nor that of the first attention"
        return finished(observation, tokenizer, known, placed, known.rows, words, details, self.placement)

    def _guess(self, estimate: Estimate, observation: Observation, tokenizer: Tokenizer) -> Tensor:
        """(N, P): the prior's patches, given what linear equations say."""
        return self.prior.settle(estimate, tokenizer, observation.std).patches

    def known_patches(
        self, joined: JoinedUpdates, observation: Observation
    ) -> tuple[KnownPatches, Tensor, dict[str, float]]:
        """What the updates give of the patches, a guess of all of them (N, P), and numbers for the details.

        Where more patches are masked than one has values, the rows of the visible ones say nothing of their pixels, and
        the span of all patches is all that is known; where noise mixes the visible rows, the span is known better than
        the rows, which still give a guess. The span is used without position gradient, too, where there are more
        patches than one has values: it is everything then, and exact, and the spans of the first attention are not.

        Raises:
            UsageError: the last update does not hold the equations that it would have to.
        """
        last, tokenizer = joined.last, joined.tokenizer
        sent = position_gradient(observation, tokenizer) is not None
        everything = not (sent or joined.reasons) and tokenizer.patch_dim < tokenizer.num_patches
        if joined.reasons and not (last.boundless or last.mixed):
            words = mask_in_words(last.masked, sent=sent)
            named = [] if not last.masked.any() or words in "; ".join(joined.reasons) else [words]
            raise UsageError("; ".join([*named, *joined.reasons]))
        estimate = joined.estimate()
        if last.boundless or last.mixed or everything:
            known = replace(known_span(observation, tokenizer), masked=last.masked, unseen=last.masked)
            guess = self._guess(estimate, observation, tokenizer) if last.mixed else known.rows
            return known, guess, {"masked": int(last.masked.sum()), "rank": len(known.basis)}
        guess = self._guess(estimate, observation, tokenizer)
        if joined.equations.updates == 1:
            known = KnownPatches(last.rows, last.basis, last.masked, last.masked, joined.noisy is not False)
            return known, guess, {"masked": int(last.masked.sum()), "rank": last.rank}
        details = {
            "masked": int(last.masked.sum()),
            "updates": joined.equations.updates,
            "never_seen": int((~joined.shown).sum()),
            "open": len(estimate.open),
        }
        rows = estimate.patches(torch.zeros_like(estimate.centre))
        noisy = joined.noisy is not False
        return KnownPatches(rows, estimate.open, last.masked, ~joined.shown, noisy), guess, details


def layers_of(model: nn.Module, layers: Sequence[str] = LAYERS) -> tuple[str, ...]:
    """Weights of the first block's layers whose spans are read, as far as the model has them."""
    block = name_of_block(model, 0)
    wanted = [f"{block}.{layer}.weight" for layer in layers]
    return tuple(name for name, _ in model.named_parameters() if name in wanted)


def seconds_of_search(
    observation: Observation, tokenizer: Tokenizer, unseen: int, rate: float = SECONDS_OF_A_PAIR
) -> float:
    """Time of the search and of the placement of `unseen` patches, on one CPU core."""
    hidden = next((len(p) for n, p in observation.model.named_parameters() if n.endswith("blocks.0.mlp.fc1.bias")), 0)
    return rate * tokenizer.num_patches**2 * hidden + SECONDS_OF_A_PLACE * unseen**2


def finished(
    observation: Observation,
    tokenizer: Tokenizer,
    known: KnownPatches,
    placed: PlacedPatches,
    guess: Tensor,
    words: str,
    details: dict[str, float],
    placement: Placement,
) -> Reconstruction:
    """The image with unseen patches placed.

    Args:
        guess: (N, P), taken where a patch's token was not found and nothing better is known.
        words: what hides the patches, for the diagnosis where most tokens were not found.
        placement: of the unseen patches.
    """
    scale, shift = (pixel_scales(tokenizer, channel, guess.device) for channel in (observation.std, observation.mean))
    deviation = placed.deviation * (1.0 if exact(known, observation) else TOKEN_ERROR)
    placed = replace(placed, deviation=deviation).in_range(scale, shift)
    missing = placed.patches.isnan().any(dim=1)
    patches = torch.where(missing[:, None], guess, placed.patches)
    patches = patches[placement(tokenizer, patches * scale + shift, known.unseen)]
    sure = placed.found & (placed.deviation < VOUCHED_DEVIATION) & ~known.unseen
    found, obstacle = int(placed.found.sum()), ""
    if found < len(missing) / 2:
        obstacle = (
            f"{words}, and for only {found} of {len(missing)} patches a token was found that the spans of the first "
            "MLP's gradients admit: a search of more rounds and starts may find more"
        )
    answer = render(observation, tokenizer, patches, sure, obstacle, details | {"found": found})
    return replace(answer, flags=(*answer.flags, ORDER_GUESSED)) if int(known.unseen.sum()) > 1 else answer


def exact(known: KnownPatches, observation: Observation) -> bool:
    """Whether linear equations without noise or rounding tell the patches apart."""
    coarse = coarseness(observation, layers_of(observation.model)) > COARSE
    return known.apart and not known.noisy and not coarse


def mask_in_words(masked: Tensor, *, sent: bool) -> str:
    """How many positions (N,) the last update masks.

    Args:
        sent: it holds the position gradient, whose rows are zero there.
    """
    what = "position rows are exactly zero" if sent else "positions are masked"
    return f"{int(masked.sum())} of {len(masked)} {what}"


def pixel_limits(tokenizer: Tokenizer, observation: Observation, device: torch.device) -> Tensor:
    """(2, P) float64 normalised: the range of pixels, with `MARGIN` at both ends."""
    scale, shift = (pixel_scales(tokenizer, channel, device) for channel in (observation.std, observation.mean))
    return torch.stack([(-MARGIN - shift) / scale, (1 + MARGIN - shift) / scale])


def pixel_scales(tokenizer: Tokenizer, values: tuple[float, ...], device: torch.device) -> Tensor:
    """(P,) float64: a number of each channel, such as its standard deviation, for all pixels of a patch."""
    each = torch.tensor(values, dtype=torch.float64, device=device)
    return each.repeat_interleave(tokenizer.patch_dim // len(values))
