"""What every closed form reads of an update: position rows, mask, and the gradient of the patch projection.

The gradient of a learnable additive position embedding holds one row for each token, g_i = dL/dz_i, and the gradient of
the patch projection is dL/dE = sum_i g_i x_i^T. Both are read here, once, together with the two things that a client
under MJP changes:

*Mask.* A masked position adds the shared unknown embedding instead of its own, so its own row is exactly zero (or,
where a client adds noise to its update, nothing but noise) and its gradient is summed into the shared row.

*Localisation loss.* MJP clients add lambda * DAL to their loss (dense absolute localisation, its equation 4). That term
depends on the position embedding, the mask and the map g, all of which the server sent or reads from the update, and it
reaches no other gradient that the closed forms use. Its gradient d (N, D) is computed from the sent model and
subtracted. lambda need not be known: every token's gradient is summed into exactly one position row and into the bias
of the patch projection, so without DAL the rows' sum plus the shared row equals dL/db, and with it

    sum_p rows_p + shared - dL/db = lambda sum_p d_p

is D equations for one number. Their misfit, the *imbalance*, shows whether anything else contributes to the rows. Where
dL/db or the shared row was not sent, the gradient of the head that localises shows lambda
(`attacks.linear.localisation`); without that too, nothing shows whether the term is in the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.linear.added_noise import NOISY, noise_without_bias
from attacks.linear.input_spans import count_inputs
from attacks.linear.intervals import COARSE, coarseness, error_bounds, format_of
from attacks.linear.localisation import localisation_gradient, weight_by_head
from attacks.observation import Observation
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer, find_tokenizer

# A share of the rows' sum that round-off explains; below it there is no DAL term to remove.
ROUND_OFF = 2e-6
# Lengths of rows of pure noise differ by less than ALIKE deviations (of relative size D^-1/2); other rows are longer
# by at least APART.
ALIKE, APART = 5.0, 1.2
# Least variance of a channel's equation, relative to the mean over channels.
LEAST_SHARE = 1e-3
# Share of dL/db by which the rows may differ from it before they are taken for something else than token gradients, and
# the same in units of what the message's precision explains.
IMBALANCE, ROUNDED = 1e-4, 4.0
# The same share above which the rows are no use to attacks that take their errors for small ones.
LARGEST_IMBALANCE = 0.05
# Above `NOISY` of dL/db an update counts as noisy. Float32 leaves 5e-8 to 2.4e-7 (six photographs, five models, also
# MJP at gamma 0.1 to 0.9), noise of 1e-6 of an update's rms entry 6e-6 to 2e-5, of 3e-6 2e-5 to 6e-5.
# Share of dL/db by which added noise may make them differ: up to there rounds are joined as without noise (it is 0.01
# to 0.03 for noise of 1e-4 of an update's rms entry on three photographs with trained models). At 0.1 and more many of
# the patches are wrong that joined updates give. Rows of noise have cosines of D^-1/2; theirs are at most so many
# times as large.
LARGEST_NOISE, UNRELATED = 0.05, 2.0
# Why an update without position gradient is not read by the spans of its first attention.
WITHOUT_WEIGHTS = "what the first attention's gradient gives needs the model's weights, which are not granted"


@dataclass(frozen=True)
class PositionRows:
    """What the closed forms use of one update.

    Attributes:
        tokenizer: of the observed model.
        rows: (N, D) float64, dL/dz of the visible patches without the localisation loss, exact zeros at masked ones.
        masked: (N,) bool, rows that hold no gradient (`masked_rows`).
        products: S, (D, P + 1) float64: dL/dE and, where the projection has a bias, dL/db as the column of a pixel of
            constant value 1; (D, P) without a bias.
        dtype: type whose round-off the gradients have, by their values (`attacks.linear.intervals`).
        dal_weight: lambda as found; 0.0 where no term was found.
        imbalance: |sum of rows + shared row - dL/db| / |dL/db|, near 0 where the rows are token gradients; NaN where
            the update lacks the gradients for it.
        noisy: whether the rows miss dL/db by more than the round-off of float32; where the update lacks the gradients
            for it, whether anything else shows noise (`attacks.linear.added_noise`), None where nothing could.
        rounding: share of dL/db by which they disagree because of the message's precision, or of noise that the client
            added and masked rows show, by expectation.
        bounds: see `bounds_of_update`.
        dropped: masked rows may be of patches that the model did not see (`Observation.drops_patches`).
        hidden: masked patches that it saw.
        num_examples, local_steps: of the update.
        doubts: `unseen_localisation`.
    """

    tokenizer: Tokenizer
    rows: Tensor
    masked: Tensor
    products: Tensor
    dtype: torch.dtype
    dal_weight: float
    imbalance: float
    noisy: bool | None
    rounding: float
    bounds: tuple[Tensor, Tensor] | None
    dropped: bool
    hidden: int
    num_examples: int
    local_steps: int
    doubts: tuple[str, ...]

    @property
    def seen(self) -> int:
        """Patches that the model saw."""
        return int((~self.masked).sum()) + self.hidden

    @property
    def weights(self) -> Tensor:
        """(D,) of mean 1, the inverse deviation of each channel's equation; ones with the digits of float32.

        The variance is that of dL/dE plus that of the rows times a pixel's, which is 1.
        """
        if self.bounds is None:
            return torch.ones_like(self.products[:, 0])
        rows, products = self.bounds
        variance = products[:, : self.tokenizer.patch_dim].square().mean(dim=1) + rows.square().sum(dim=0)
        found = variance.clamp(min=LEAST_SHARE * float(variance.mean())).rsqrt()
        return found / found.mean()

    def mask_in_words(self) -> str:
        """How many of how many rows are zero."""
        return f"{int(self.masked.sum())} of {len(self.masked)} position rows are exactly zero"

    def unmet_assumptions(self) -> list[str]:
        """Why equations of one image and one step do not fit this update, in words; empty where they do."""
        reasons = unmet_assumptions(self.num_examples, self.local_steps)
        return reasons + unbalanced(self.imbalance, self.rounding) + list(self.doubts)


def read_position_rows(observation: Observation) -> PositionRows:
    """Read one update.

    Raises:
        UsageError: the model has no tokenizer or no position embedding, or the update does not hold the gradients of
            position embedding and patch projection.
    """
    return observation.once(_read_position_rows)


def _read_position_rows(observation: Observation) -> PositionRows:
    tokenizer = find_tokenizer(observation.model, observation.image_shape)
    sent = position_gradient(observation, tokenizer)
    if sent is None:
        raise UsageError(missing_positions(observation, tokenizer))
    rows, masked, weight, imbalance = remove_localisation(observation, tokenizer, sent[tokenizer.prefix :])
    products, hidden = projection_products(observation, tokenizer), int(masked.sum())
    if observation.drops_patches:
        seen = count_inputs(products, observation.gradients[tokenizer.weight].dtype)
        hidden = min(hidden, max(seen - int((~masked).sum()), 0))
    noisy = imbalance > NOISY
    if math.isnan(imbalance) and products.isfinite().all() and rows.isfinite().all():
        noisy = noise_without_bias(observation, rows[~masked], products, hidden)
    return PositionRows(
        tokenizer,
        rows,
        masked,
        products,
        format_of(observation, tokenizer.weight),
        weight,
        imbalance,
        noisy,
        math.hypot(
            rounding_of_balance(observation, tokenizer), _noise_of_balance(sent[tokenizer.prefix :], masked, products)
        ),
        bounds_of_update(observation, tokenizer),
        observation.drops_patches,
        hidden,
        observation.num_examples,
        observation.local_steps,
        tuple(unseen_localisation(observation, tokenizer, rows, masked)),
    )


def position_gradient(observation: Observation, tokenizer: Tokenizer) -> Tensor | None:
    """Position gradient as sent, with its prefix rows, (prefix + N, D); None where the update holds none, or only
    zeros."""
    rows = tokenizer.position_rows(observation.gradients)
    return None if rows is None or not rows.any() else rows


def missing_positions(observation: Observation, tokenizer: Tokenizer) -> str:
    """Why there are no position rows, in words."""
    if tokenizer.positions is None:
        return "the model has no learnable position embedding, so the update holds no gradient per token to solve with"
    if tokenizer.positions in observation.gradients:
        return (
            f"the gradient of {tokenizer.positions} is zero everywhere (frozen or withheld, or a classifier that "
            "starts at zero lets nothing through to the tokens), so there is nothing to solve with"
        )
    return (
        f"the update holds no gradient of {tokenizer.positions} (frozen or withheld), so there is nothing to solve with"
    )


def projection_products(observation: Observation, tokenizer: Tokenizer) -> Tensor:
    """S, (D, P + 1) float64: dL/dE and, where there is one, dL/db as the column of the constant pixel.

    Raises:
        UsageError: see `projection_gradient`.
    """
    weight, bias = projection_gradient(observation, tokenizer), _bias_gradient(observation, tokenizer)
    return weight if bias is None else torch.cat([weight, bias[:, None]], dim=1)


def projection_gradient(observation: Observation, tokenizer: Tokenizer) -> Tensor:
    """dL/dE, (D, P) float64.

    Raises:
        UsageError: the update does not hold it, or holds only zeros.
    """
    weight = observation.gradient_of(tokenizer.weight).flatten(1).to(torch.float64)
    if not weight.any():
        raise UsageError(f"the gradient of {tokenizer.weight} is zero everywhere, so there is nothing to solve with")
    return weight


def _bias_gradient(observation: Observation, tokenizer: Tokenizer) -> Tensor | None:
    """dL/db, (D,) float64; None where the projection has no bias, or a frozen one."""
    bias = observation.gradients.get(tokenizer.bias) if tokenizer.bias else None
    return None if bias is None or not bias.any() else bias.to(torch.float64)


def unmet_assumptions(num_examples: int, local_steps: int) -> list[str]:
    """Why equations of one image and one step do not fit an update of so many images and steps, in words."""
    reasons = []
    if num_examples > 1:
        reasons.append(f"the batch holds {num_examples} images: their gradients add up and the solve returns a mixture")
    if local_steps > 1:
        reasons.append(
            f"the update sums {local_steps} local steps: several batches and changing weights are mixed in it"
        )
    return reasons


def places_unknown(tokenizer: Tokenizer) -> list[str]:
    """Why tokens that were found one by one do not tell their places by the embeddings that they bear, in words."""
    reasons = []
    if tokenizer.positions is None and tokenizer.fixed_positions is None:
        reasons.append("the model has no learnable position embedding, nor a fixed one: nothing tells a patch's place")
    if tokenizer.hides_positions:
        reasons.append("positions of this model may be masked, and a masked token's place is not looked for here")
    return reasons


def unseen_noise(noisy: bool | None) -> list[str]:
    """That nothing shows whether an update holds noise, in words; empty where something does.

    Args:
        noisy: see `PositionRows`.
    """
    if noisy is not None:
        return []
    return [
        "whether the update holds noise does not show, and with no more channels than patches noise would leave wrong "
        "ones: it lacks the gradient of the projection's bias, and that of the first attention's with its bias"
    ]


def unbalanced(imbalance: float, rounding: float) -> list[str]:
    """What it means, in words, that the rows and the bias of the projection disagree; empty where they agree.

    Args:
        imbalance, rounding: see `PositionRows`.
    """
    if not imbalance > max(IMBALANCE, ROUNDED * rounding):
        return []
    return [
        f"the position rows miss the projection bias' gradient by {imbalance:.2%}: something else than tokens "
        "contributes to them (noise, or an unknown loss on the position embedding)"
    ]


def rounding_of_balance(observation: Observation, tokenizer: Tokenizer) -> float:
    """See `PositionRows.rounding`; 0 where the update lacks a gradient that the balance needs."""
    bias = _bias_gradient(observation, tokenizer)
    if bias is None:
        return 0.0
    names = {tokenizer.positions, tokenizer.shared_position, tokenizer.bias} & set(observation.gradients)
    bounds = {name: error_bounds(observation, name) for name in names}
    rows, shared = tokenizer.position_rows(bounds), tokenizer.shared_embedding(bounds)
    parts = [bounds[tokenizer.bias], *([] if rows is None else [rows[tokenizer.prefix :]])]
    parts += [] if shared is None else [shared]
    squares = sum(float(part.square().sum()) / 3 for part in parts)
    return squares**0.5 / float(bias.norm())


def bounds_of_update(observation: Observation, tokenizer: Tokenizer) -> tuple[Tensor, Tensor] | None:
    """Largest errors of the patches' rows (N, D) and of S, float64 and of its shape; None where the update has the
    digits of float32."""
    if coarseness(observation, (tokenizer.positions, tokenizer.weight)) <= COARSE:
        return None
    rows = tokenizer.position_rows({tokenizer.positions: error_bounds(observation, tokenizer.positions)})
    parts = [error_bounds(observation, tokenizer.weight).flatten(1)]
    if _bias_gradient(observation, tokenizer) is not None:
        parts.append(error_bounds(observation, tokenizer.bias)[:, None])
    return rows[tokenizer.prefix :], torch.cat(parts, dim=1)


def _noise_of_balance(rows: Tensor, masked: Tensor, products: Tensor) -> float:
    """Share of dL/db by which the rows disagree with it because of noise, by expectation; 0 above `LARGEST_NOISE`.

    Masked rows (`masked_rows`) hold nothing but noise, and show its size. It is in every visible row, in the shared one
    and in dL/db.

    Args:
        rows: (N, D) as sent.
        products: the constant pixel's column comes last.
    """
    noise, width = rows[masked].double(), rows.shape[1]
    if len(noise) < 2 or not noise.any():
        return 0.0
    cosines = torch.corrcoef(noise)
    cosines.fill_diagonal_(0)
    if float(cosines.square().sum()) > UNRELATED**2 / width * len(noise) * (len(noise) - 1):
        return 0.0  # something else than noise, such as weight decay, which related positions have alike
    size = float(noise.square().mean().sqrt())
    share = size * (width * (int((~masked).sum()) + 2)) ** 0.5 / float(products[:, -1].norm())
    return share if share <= LARGEST_NOISE else 0.0


def masked_rows(rows: Tensor) -> Tensor:
    """(N,) bool, which of the position rows (N, D) hold no gradient: exact zeros, or nothing but noise.

    Rows of pure noise are all of one length, for D numbers leave no room for chance, and shorter than every other.
    """
    lengths = rows.to(torch.float64).norm(dim=1)
    ordered = lengths.sort().values
    if not ordered[0] > 0:
        return lengths == 0
    alike = lengths < (1 + ALIKE * rows.shape[1] ** -0.5) * ordered[0]
    count = int(alike.sum())
    apart = count < len(rows) and bool(ordered[count] > APART * ordered[count - 1])
    return alike & (count > 1 and apart)


def remove_localisation(
    observation: Observation, tokenizer: Tokenizer, rows: Tensor, masked: Tensor | None = None
) -> tuple[Tensor, Tensor, float, float]:
    """Find the mask and subtract the localisation loss from the patches' position rows (N, D) as sent.

    Args:
        masked: (N,) bool, the mask where it is known.

    Returns:
        rows (N, D) float64, masked (N,) bool, lambda, imbalance: see `PositionRows`.
    """
    if masked is None:
        # Without a shared embedding nothing is masked, and rows that are alike are no noise.
        masked = masked_rows(rows) if tokenizer.hides_positions else (rows == 0).all(dim=1)
    rows = torch.where(masked[:, None], 0.0, rows.to(torch.float64))
    excess = _excess(observation, tokenizer, rows, masked)
    if excess is None:
        shown = None if tokenizer.localisation is None else weight_by_head(observation, tokenizer, masked)
        if shown:
            rows = rows - shown * localisation_gradient(observation, tokenizer, masked)
        return rows, masked, shown or 0.0, float("nan")
    scale = _bias_gradient(observation, tokenizer).norm()
    weight = 0.0
    least = max(ROUND_OFF, ROUNDED * rounding_of_balance(observation, tokenizer))
    if excess.norm() > least * scale and tokenizer.localisation is not None:
        term = localisation_gradient(observation, tokenizer, masked)  # (N, D)
        total = term.sum(dim=0)
        if total.norm() > 0:
            weight = float(excess @ total / total.square().sum())
            rows, excess = rows - weight * term, excess - weight * total
    return rows, masked, weight, float(excess.norm() / scale)


def unseen_localisation(observation: Observation, tokenizer: Tokenizer, rows: Tensor, masked: Tensor) -> list[str]:
    """That nothing shows whether a localisation loss is in the rows, in words; empty where something does.

    Args:
        rows, masked: (N, D) float64 and (N,) of the patches.
    """
    if tokenizer.localisation is None or _excess(observation, tokenizer, rows, masked) is not None:
        return []
    if weight_by_head(observation, tokenizer, masked) is not None:
        return []
    return [
        "whether the position rows hold a localisation loss does not show: the update lacks the gradient of the "
        f"projection's bias or of the shared position, and that of {tokenizer.localisation}"
    ]


def _excess(observation: Observation, tokenizer: Tokenizer, rows: Tensor, masked: Tensor) -> Tensor | None:
    """sum of rows + shared row - dL/db, (D,), or None where the update lacks one of them."""
    bias = _bias_gradient(observation, tokenizer)
    if bias is None:
        return None
    shared = tokenizer.shared_embedding(observation.gradients)
    if shared is None:
        return None if masked.any() else rows.sum(dim=0) - bias
    return rows.sum(dim=0) + shared.double() - bias
