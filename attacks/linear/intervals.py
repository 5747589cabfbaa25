"""How far an entry of a message may be from the number that the client computed, read from the numbers themselves.

A rounded entry says that the true one lies in an interval around it, and how long that interval is can be seen:

*Floating-point formats.* All entries are numbers of bfloat16 or of float16: half the spacing of that format at the
entry's own exponent. The lowest bit that is set anywhere in a float16 tensor shows where its subnormal numbers begin,
also after a power of two was divided out (loss scaling); zeros are entries below half of it.

*Grids* (`attacks.linear.grids`; int4 and int8, a tensor or a channel, symmetric or affine). The entries are whole
multiples of one step: half a step. Rounding at random (QSGD) errs by up to a whole one, with twice the variance. Sums
that vanish for a gradient show which it is: the position rows and the bias of the patch projection add up to zero
(`attacks.identities.position_balance`), and miss it by what the roundings add up to. Only where that is what rounding
to nearest leaves is it taken for that; where rows are too small for the grid, or lack, it is taken for rounding at
random, and where a localisation loss is added to them, for rounding to nearest. *Signs* with one magnitude a tensor or
a channel say nothing of an entry's size but its mean: a deviation as large as the mean is taken, that of an exponential
size.

*Entries left out.* Zeros scattered over rows and columns that are not zero. If the others leave a gap around zero
(top-k), an entry that was not sent is not above the smallest one that was; if they do not (a random choice), it is
taken to be of the size of the others. The others have their own format's spacing.

*Returned weights.* An update that was computed as (sent - returned) / learning rate has the spacing of the returned
weights, divided by the learning rate: large weights lose more digits than small ones. Beside it stands what the
difference itself shows, signs, a grid or entries left out.

The error of an entry is taken for uniform in its interval: deviation = bound / sqrt(3). For rounding at random, signs
and random choices, whose errors are not, the bound is sqrt(3) deviations. Float32 gradients have bounds too, but what
their sums over tokens lose is more than the spacing of the result: closed forms measure that noise instead
(`attacks.linear.least_squares`) and use these bounds only where they are `coarse`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.identities import position_balance, tokenizer_of
from attacks.linear.grids import ALMOST_ALL, grid_of, sample, signs_of
from attacks.observation import Observation

# Significant bits, the leading one included.
BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}
LEAST_FLOAT16 = 2.0**-24  # its smallest number
# Share of scattered zeros from which entries were left out, with a gap around zero and without one (a ResNet's own are
# 0.02 to 0.14), and least ratio of the smallest entry to the lowest bit.
SPARSE_WITH_GAP, SPARSE, ABOVE_UNDERFLOW = 0.02, 0.2, 8.0
# Smallest entry that was sent relative to the median one: at least, where the largest were chosen (measured 0.03 to
# 0.84 for shares of 0.9 to 0.01), and in units of what a random choice of n entries leaves, at most 3 / n.
GAP, GAP_OF_CHANCE = 3e-3, 10.0
# Entries that returned weights round to zero have as many neighbours that are a few roundings large.
FEW_ROUNDINGS, NEIGHBOURS = 4.0, 0.25
# Steps above which the smallest entry on a grid shows that others were left out, and not rounded to zero.
LEFT_OUT = 1.5
# Mean square of sums that vanish, relative to what rounding to nearest leaves: between these where it is that (measured
# 0.8 to 1.2 on grids that are fine for the rows; rounding at random 1.3 to 2.4), and the least median entry of rows, in
# steps, on a fine grid.
NEAREST, FINE = (0.75, 1.2), 1.0
# Deviation of an entry relative to the rms entry above which bounds matter more than the round-off of float32 sums.
COARSE = 1e-6
# Largest ratio of what another update of the same image leaves outside of a row space to what the target itself leaves
# (measured 1.1 to 2.0 at bfloat16 and below; with more digits, where it is up to 10, the geometric mean decides). What
# another photograph leaves there: at least, and at least for all but very flat photographs. Round-off in float32.
SAME, OTHER_SHARE, USUAL_OTHER_SHARE, LEAST_SHARE = 3.0, 3e-3, 3e-2, 1e-7
# Differences of weights may miss the numbers of a format by this much.
SLACK = 4 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Message:
    """How an update as a whole was made.

    Attributes:
        chosen: which entries were left out: "none", those below the "largest", or "random" ones.
        whole_steps: grids may be rounded at random, by up to a whole step.
    """

    chosen: str = "none"
    whole_steps: bool = False


def error_bounds(observation: Observation, name: str) -> Tensor:
    """Half the length of each entry's interval, float64 and of the shape of the gradient called `name`.

    Raises:
        UsageError: the update lacks the gradient.
    """
    if name in observation.bounds:
        return observation.bounds[name]
    values, message = observation.gradient_of(name).detach(), read_message(observation)
    return bounds_of(values, message, rounding_of_weights(observation, name))


def spacing(observation: Observation, name: str) -> Tensor:
    """Distance of the numbers that each entry may have been rounded to, float64; twice the bound of one left out."""
    values, rounding = observation.gradient_of(name).detach().double(), rounding_of_weights(observation, name)
    step = grid_of(values, rounding) if values.any() else None
    return 2 * error_bounds(observation, name) if step is None else step.expand(values.shape)


def rounding_of_weights(observation: Observation, name: str) -> Tensor | None:
    """What the entries called `name` lose where weights were returned, float64; None for gradients.

    Raises:
        UsageError: the update lacks the gradient.
    """
    if not returns_weights(observation):
        return None
    returned, kind = _numbers_sent(observation, name), sent_format(observation, name)
    least = LEAST_FLOAT16 / 2 if kind == torch.float16 else 0.0
    # Every local step rounds anew.
    steps = observation.local_steps**0.5
    return steps * _half_spacing(returned.double(), kind).clamp(min=least) / observation.learning_rate


def returns_weights(observation: Observation) -> bool:
    """Whether the client sent weights, which were turned into a gradient by the learning rate."""
    return observation.kind == "weights" and bool(observation.learning_rate)


def sent_format(observation: Observation, name: str) -> torch.dtype:
    """The coarsest floating-point format that the numbers sent for the parameter called `name` all have.

    Raises:
        UsageError: the update lacks its gradient.
    """
    return _format(_numbers_sent(observation, name), SLACK if returns_weights(observation) else 0.0)


def _numbers_sent(observation: Observation, name: str) -> Tensor:
    """The gradient called `name`, or the weights that were returned."""
    gradient = observation.gradient_of(name).detach()
    if not returns_weights(observation):
        return gradient
    weight = dict(observation.model.named_parameters())[name].detach()
    returned = weight.double() - observation.learning_rate * gradient.double()
    return returned.to(torch.promote_types(gradient.dtype, torch.float32))


def bounds_of(gradient: Tensor, message: Message | None = None, rounding: Tensor | None = None) -> Tensor:
    """`error_bounds` of a tensor.

    Args:
        message: the update that it is part of; None where it is the only one.
        rounding: see `rounding_of_weights`.
    """
    values = gradient.double()
    if not values.any():
        return torch.zeros_like(values) if rounding is None else rounding
    beside = 0.0 if rounding is None else rounding
    message = Message(_choice([(values, rounding)])) if message is None else message
    magnitude = signs_of(values, rounding)
    if magnitude is not None:
        return (3**0.5 * magnitude + beside).expand(values.shape)
    step = grid_of(values, rounding)
    if step is not None:
        bounds = (step * (0.5**0.5 if message.whole_steps else 0.5) + beside).expand(values.shape)
        kept = values != 0
        if message.chosen == "largest" and float((values.abs() / step)[kept].min()) > LEFT_OUT:
            return torch.where(kept, bounds, bounds + float(values[kept].abs().min()))
        return bounds
    kind = torch.float32 if rounding is not None else _format(gradient, 0.0)
    bounds, floor = _half_spacing(values, kind) if rounding is None else rounding, 0.0
    if kind == torch.float16:
        floor = _lowest_bit(values[values != 0])
        bounds = bounds.clamp(min=floor / 2)
    sizes = values[values != 0].abs()
    if message.chosen == "largest" and float(sizes.min()) > ABOVE_UNDERFLOW * floor:
        return torch.where(values == 0, float(sizes.min()) * (1 + 2.0 ** -BITS[kind]) + beside, bounds)
    if message.chosen == "random":
        return torch.where(values == 0, (3 * sizes.square().mean()).sqrt() + beside, bounds)
    return bounds


def read_message(observation: Observation) -> Message:
    """How an update was made, by its entries."""
    return observation.once(_read_message)


def _read_message(observation: Observation) -> Message:
    parts = (  # an honest update has few tensors with zeros, and only those are read
        (g.detach().double(), _rounding(observation, n))
        for n, g in observation.gradients.items()
        if g.dim() > 1 and not g.all() and g.any()
    )
    whole = sum(g.numel() for g in observation.gradients.values() if g.dim() > 1 and g.all())
    return Message(_choice(parts, whole), _rounds_by_whole_steps(observation))


def _rounding(observation: Observation, name: str) -> Tensor | None:
    known = not returns_weights(observation) or name in dict(observation.model.named_parameters())
    return rounding_of_weights(observation, name) if known else None


def _choice(parts: Iterable[tuple[Tensor, Tensor | None]], whole: int = 0) -> str:
    """`Message.chosen` of an update.

    Args:
        parts: its tensors that hold zeros, float64, and what returning weights costs their entries.
        whole: entries of the others.
    """
    zeros, entries = 0, whole
    sent, gap = 1, 0.0  # of the tensor with scattered zeros of which most entries were sent
    for values, rounding in parts:
        rows = without_zero_rows(values)
        missing, sizes = int((rows == 0).sum()), values[values != 0].abs()
        if rounding is not None and _rounded_to_zero(values, rounding):
            missing = 0
        zeros, entries = zeros + missing, entries + rows.numel()
        if missing >= SPARSE_WITH_GAP * rows.numel() and len(sizes) > sent:
            sent, gap = len(sizes), float(sizes.min() / sizes.median())
    if not entries or zeros < SPARSE_WITH_GAP * entries:
        return "none"
    if gap > max(GAP, GAP_OF_CHANCE / sent):
        return "largest"
    return "random" if zeros >= SPARSE * entries else "none"


def _rounded_to_zero(values: Tensor, rounding: Tensor) -> bool:
    """Whether the rounding of returned weights explains the entries that are zero."""
    small = (values != 0) & (values.abs() <= FEW_ROUNDINGS * rounding)
    return int(small.sum()) >= NEIGHBOURS * int((values == 0).sum())


def _rounds_by_whole_steps(observation: Observation) -> bool:
    """Whether the grids of an update may be rounded at random, by the sum of its position rows and its bias."""
    tokenizer, balance = tokenizer_of(observation), position_balance(observation)
    if tokenizer is None or balance is None:
        return True
    if tokenizer.localisation is not None:
        return False
    bounds = {}
    for name in (tokenizer.positions, tokenizer.shared_position, tokenizer.bias):
        if name in observation.gradients:
            values = observation.gradients[name].detach().double()
            step = grid_of(values, _rounding(observation, name))
            bounds[name] = torch.zeros_like(values) if step is None else (step / 2).expand(values.shape)
    rows = tokenizer.position_rows(bounds)
    parts = [tokenizer.shared_embedding(bounds), bounds.get(tokenizer.bias), rows]
    rows = None if rows is None else rows[tokenizer.prefix :]
    parts = [part.reshape(-1, tokenizer.width) for part in (*parts[:2], rows) if part is not None]
    entries = tokenizer.position_rows(observation.gradients)
    if rows is not None and rows.any():
        fine = entries[tokenizer.prefix :].detach().abs() / (2 * rows)
        if not float(fine[rows > 0].median()) >= FINE:
            return True
    explained = float(torch.cat(parts).square().sum(dim=0).mean()) / 3
    if not explained:
        return False
    return not NEAREST[0] < float(balance.of_update.square().mean()) / explained < NEAREST[1]


def relative_deviation(gradient: Tensor, bounds: Tensor) -> float:
    """Rms error of an entry relative to the rms entry; 0 for a tensor of zeros."""
    size = float(gradient.double().square().mean().sqrt())
    return float(bounds.square().mean().sqrt()) / 3**0.5 / size if size > 0 else 0.0


def _relative_deviation(observation: Observation, name: str) -> float:
    return relative_deviation(observation.gradient_of(name).detach(), error_bounds(observation, name))


def coarseness(observation: Observation, names: tuple[str | None, ...]) -> float:
    """The largest `relative_deviation` of the gradients called `names`; those that the update lacks are skipped."""
    held = [name for name in names if name in observation.gradients]
    return max((observation.once(_relative_deviation, name) for name in held), default=0.0)


def format_of(observation: Observation, name: str) -> torch.dtype:
    """The floating-point type whose round-off the gradient called `name` has.

    Grids and entries that were not sent count as bfloat16, the coarsest type.

    Raises:
        UsageError: the update lacks the gradient.
    """
    relative = observation.once(_relative_deviation, name)
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    return next((kind for kind in kinds if relative <= torch.finfo(kind).eps), torch.bfloat16)


def largest_share_of_same_image(own: float) -> float:
    """The share of an update outside of a target's row space up to which it shows the target's image.

    Row spaces show which updates are of one image (`attacks.mjp.same_image`). The target's own share `own` is the
    noise of its message; another update of the same image leaves up to twice as much there, and another photograph
    leaves `OTHER_SHARE` at least.

    Args:
        own: share of the target's products outside of its own row space.
    """
    own = max(own, LEAST_SHARE)
    return max((own * OTHER_SHARE) ** 0.5, min(SAME * own, USUAL_OTHER_SHARE))


def _format(values: Tensor, slack: float) -> torch.dtype:
    """The coarsest floating-point format whose numbers all entries are, but for a relative `slack`."""
    if values.dtype in (torch.float16, torch.bfloat16):
        return values.dtype
    if values.dtype == torch.float64 and bool((values.float().double() != values).any()):
        return torch.float64
    sampled = sample(values).float()
    mantissas, _ = torch.frexp(sampled.double())
    for kind in (torch.bfloat16, torch.float16):  # by digits alone: a power of two may have been divided out
        digits = mantissas * 2.0 ** BITS[kind]
        fits = (digits - digits.round()).abs() <= slack * digits.abs()
        # Where two numbers nearly cancel, more digits than the slack are lost.
        if sampled.any() and float(fits.double().mean()) >= (ALMOST_ALL if slack else 1.0):
            return kind
    return torch.float32


def _half_spacing(values: Tensor, kind: torch.dtype) -> Tensor:
    """Half the distance of neighbouring numbers of a format at each value, 0 at 0."""
    _, exponents = torch.frexp(values)  # |value| in [2^(e-1), 2^e)
    spacing = torch.ldexp(torch.ones_like(values), exponents - BITS[kind] - 1)
    return torch.where(values == 0, 0.0, spacing)


def _lowest_bit(values: Tensor) -> float:
    """The lowest bit that is set in any of the values, as a number."""
    mantissas, exponents = torch.frexp(values)
    whole = (mantissas.abs() * 2.0 ** BITS[torch.float32]).long()  # exact for float32 numbers
    lowest = (whole & -whole).double()
    return float((lowest * torch.ldexp(torch.ones_like(values), exponents - BITS[torch.float32])).min())


def without_zero_rows(values: Tensor) -> Tensor:
    """The rows and columns of a matrix, table or filters that are not zero, (R, c); a single row as it is."""
    rows = values.flatten(1) if len(values) > 1 and values.dim() > 1 else values.reshape(-1, values.shape[-1])
    return rows if len(rows) == 1 else rows[(rows != 0).any(dim=1)][:, (rows != 0).any(dim=0)]
