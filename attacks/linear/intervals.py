"""How far an entry of a message may be from the number that the client computed, read from the numbers themselves.

A rounded entry says that the true one lies in an interval around it, and how long that interval is can be seen:

*Floating-point formats.* All entries are numbers of bfloat16 or of float16: half the spacing of that format at the
entry's own exponent. The lowest bit that is set anywhere in a float16 tensor shows where its subnormal numbers begin,
also after a power of two was divided out (loss scaling); zeros are entries below half of it.

*Grids* (int8 a tensor or a channel, symmetric or affine). The entries are whole multiples of one step, at most 255 of
them: half a step.

*Kept entries* (top-k). Zeros scattered over rows and columns that are not zero: an entry that was not sent is not above
the smallest one that was; the others have their own format's spacing.

*Returned weights.* An update that was computed as (sent - returned) / learning rate has the spacing of the returned
weights, divided by the learning rate: large weights lose more digits than small ones.

The error of an entry is taken for uniform in its interval: deviation = bound / sqrt(3). Float32 gradients have bounds
too, but what their sums over tokens lose is more than the spacing of the result: closed forms measure that noise
instead (`attacks.linear.least_squares`) and use these bounds only where they are `coarse`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.observation import Observation

# Significant bits, the leading one included.
BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}
LEAST_FLOAT16 = 2.0**-24  # its smallest number
# Steps between the smallest and the largest of 256 values; distance from a whole number of steps, in steps.
STEPS, ON_GRID = 255, 0.01
# Fewest different values that show a grid, least entries of a channel with one of its own, entries looked at first.
LEAST_DIFFERENT, LEAST_IN_A_ROW, SOME = 4, 16, 1024
# Share of scattered zeros from which entries were left out, and least ratio of the smallest entry to the lowest bit.
SPARSE, ABOVE_UNDERFLOW = 0.2, 8.0
# Deviation of an entry relative to the rms entry above which bounds matter more than the round-off of float32 sums.
COARSE = 1e-6
# Largest ratio of what another update of the same image leaves outside of a row space to what the target itself leaves
# (measured 1.1 to 2.0 at bfloat16 and below; with more digits, where it is up to 10, the geometric mean decides). What
# another photograph leaves there: at least, and at least for all but very flat photographs. Round-off in float32.
SAME, OTHER_SHARE, USUAL_OTHER_SHARE, LEAST_SHARE = 3.0, 3e-3, 3e-2, 1e-7
# Gradients and weights are compared with a format on at most so many entries; differences of weights may miss it by
# this much, and this share of them must not.
SAMPLE, SLACK, ALMOST_ALL = 65536, 4 * torch.finfo(torch.float32).eps, 0.98


def error_bounds(observation: Observation, name: str) -> Tensor:
    """Half the length of each entry's interval, float64 and of the shape of the gradient called `name`.

    Raises:
        UsageError: the update lacks the gradient.
    """
    if name in observation.bounds:
        return observation.bounds[name]
    if not returns_weights(observation):
        return bounds_of(observation.gradient_of(name).detach())
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


def bounds_of(gradient: Tensor) -> Tensor:
    """`error_bounds` of a tensor that was sent as it is."""
    values = gradient.double()
    if not values.any():
        return torch.zeros_like(values)
    step = grid_of(values)
    if step is not None:
        return (step / 2).expand(values.shape)
    kind = _format(gradient, 0.0)
    bounds = _half_spacing(values, kind)
    floor = _lowest_bit(values[values != 0]) if kind == torch.float16 else 0.0
    bounds = bounds.clamp(min=floor / 2)
    smallest = float(values[values != 0].abs().min())
    if float((without_zero_rows(values) == 0).double().mean()) > SPARSE and smallest > ABOVE_UNDERFLOW * floor:
        bounds = torch.where(values == 0, smallest * (1 + 2.0 ** -BITS[kind]), bounds)
    return bounds


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

    Row spaces show which updates are of one image (`attacks.mjp.joined_updates`). The target's own share `own` is the
    noise of its message; another update of the same image leaves up to twice as much there, and another photograph
    leaves `OTHER_SHARE` at least.

    Args:
        own: share of the target's products outside of its own row space.
    """
    own = max(own, LEAST_SHARE)
    return max((own * OTHER_SHARE) ** 0.5, min(SAME * own, USUAL_OTHER_SHARE))


def sample(tensor: Tensor) -> Tensor:
    """At most `SAMPLE` entries, spread evenly, flat."""
    flat = tensor.flatten()
    return flat[:: -(-len(flat) // SAMPLE)]


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


def grid_of(values: Tensor) -> Tensor | None:
    """The step of the grid on which all values lie: (), or a step a channel, broadcastable; None where they do not.

    A channel is a row of a matrix, of a table or of filters, or a column of them.
    """
    step = _step_of(values.flatten())
    if step is not None or values.dim() < 2:
        return None if step is None else torch.tensor(step).to(values)
    ones = [1] * (values.dim() - 1)
    for rows, shape in (
        (values.flatten(1), (-1, *ones)),
        (values.reshape(-1, values.shape[-1]), (*values.shape[:-1], 1)),
        (values.flatten(1).mT, (1, *values.shape[1:])),
    ):
        if len(rows) == 1 or rows.shape[1] < LEAST_IN_A_ROW:
            continue
        steps = []
        for row in rows:
            found = _step_of(row) if row.any() else 0.0
            if found is None:
                break
            steps.append(found)
        else:
            return torch.tensor(steps).to(values).reshape(shape)
    return None


def _step_of(values: Tensor) -> float | None:
    """The step whose whole multiples, at most `STEPS`, the differences of all values are; None where there is none."""
    if any(len(some.unique()) > STEPS + 1 for some in (values[:SOME], sample(values))):
        return None
    different = values.unique().double()
    if not LEAST_DIFFERENT <= len(different) <= STEPS + 1:
        return None
    offsets = different - different[0]
    extent, largest = float(offsets[-1]), float(different.abs().max())
    for step in (largest / 127, extent / 255, float(offsets.diff().min())):
        multiples = offsets / step
        if extent / step < STEPS + 1 and float((multiples - multiples.round()).abs().max()) < ON_GRID:
            return step
    return None


def without_zero_rows(values: Tensor) -> Tensor:
    """The rows and columns of a matrix, table or filters that are not zero, (R, c); a single row as it is."""
    rows = values.flatten(1) if len(values) > 1 and values.dim() > 1 else values.reshape(-1, values.shape[-1])
    return rows if len(rows) == 1 else rows[(rows != 0).any(dim=1)][:, (rows != 0).any(dim=0)]
