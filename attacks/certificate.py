"""A check of an attack's answer that needs no originals: does it reproduce the update?

The server has the weights that it sent, so it can run the client's step on the reconstruction and compare the gradient
with the one received. A reconstruction that agrees to the precision of the message is *certified*: on photographs the
relative residual is 1e-6 to 1e-5 for exact answers and above 2e-2 for answers with wrong patches, with nothing in
between (DeiT-S random, vit_mini_64 random and trained, float32, with and without MJP; benchmarks/calibration.py
measures it). An answer that is only close, or whose update cannot be reproduced (batch norms, labels unknown), is not
certified; that says nothing against it. Several local steps are repeated on the answer, so that only those on one batch
can be certified. A message of low precision (read from its values, `attacks.linear.intervals`) is reproduced to its own
rounding at best: that much is allowed, up to half the residual of wrong answers, so that nothing is certified in
messages of int8 or top-k.

Compared are all gradients that the classification loss reaches (`certify`). A defence may change those of the
classifier (Soteria), or make them depend on random numbers of the client (PRECODE); labels may be mixed or smoothed. Of
one image the encoder's gradients can be compared all the same (`certify_encoder`): what they hold of classifier and
loss is the gradient at the representation, which the message holds as well. Rows then carry the flag
`classifier_left_out`.

Masked positions are read from the update. Jigsawing needs no care: masked patches share one embedding and attention
does not depend on order, so the gradient is the same wherever they stand. Position tables are left out of the
comparison, because a localisation loss may have been added to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from attacks.classifier import find_classifier
from attacks.frozen import without_frozen
from attacks.linear.completion import VOUCHED_DEVIATION
from attacks.linear.intervals import error_bounds, returns_weights
from attacks.linear.position_rows import masked_rows, position_gradient
from attacks.observation import ORDER_GUESSED, SUPERVISED, Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer, find_tokenizer, logits_of

# Largest relative residual of a certified answer, and the same in units of what rounding the message leaves by
# expectation. No answer above DOUBTFUL is certified: wrong ones begin at 2e-2.
TOLERANCE, ROUND_OFF_UNITS, DOUBTFUL = 1e-3, 1.5, 1e-2
# Least ratio of what an unrecognisable error leaves, and what a certified answer does. On honest models 470 and more
# (float32 and float16); on those that `adapter_trap` and `lora_trap` send, whose tokens hold little but codes, 1 to 6
# for answers of which half or more is missing.
APART = 20.0
# Batches of more images have too many orders of their labels to try.
LARGEST_BATCH = 3


def certify(observation: Observation, found: Reconstruction) -> tuple[bool, float]:
    """Compare the gradient of a reconstruction with the one received.

    Args:
        observation: one update, with the model as it was sent.
        found: an attack's answer to it.

    Returns:
        Whether the answer is certified, and the relative residual |g(reconstruction) - g| / |g| over the parameters
        that were compared; (False, NaN) where it cannot be computed. Patches that were placed by a guess reproduce the
        gradient in every order and are not certified.
    """
    if found.images is None or not _reproducible(observation, len(found.images)):
        return False, float("nan")
    observation = without_frozen(observation)
    tokenizer = _tokenizer(observation)
    compared = _compared(observation, tokenizer)
    size = _norm(compared)
    if not size > 0:
        return False, float("nan")

    def residual(images: Tensor) -> float:
        """Of the order of labels that agrees best; infinite where the labels are unknown."""
        gradients = _gradients(observation, images, compared, tokenizer, found.labels)
        return min((_norm({n: g - compared[n] for n, g in one.items()}) / size for one in gradients), default=math.inf)

    least = residual(found.images)
    if math.isinf(least):
        return False, float("nan")
    return _agrees(observation, found, compared, least, size) and _tells_apart(found.images, least, residual), least


def certify_encoder(observation: Observation, found: Reconstruction) -> tuple[bool, float]:
    """Compare the encoder's gradients alone, given the one at its output.

    Let y_t be the tokens after the last layer norm, y_t = gamma * (...) + beta. The classifier reads the class token or
    the mean of the tokens, so that dL/dy_t = w_t dL/dbeta with weights w_t that follow from the architecture, and
    dL/dbeta is in the message. It is carried back through the encoder on the answer, whatever the loss was.

    Args:
        observation: one update of one image, with the model as it was sent.
        found: an attack's answer to it.

    Returns:
        As `certify` does, over the parameters of the encoder; (False, NaN) where that cannot be computed.
    """
    nothing, observation = (False, float("nan")), without_frozen(observation.legible())
    one_step = observation.num_examples == 1 and observation.local_steps == 1
    if found.images is None or not one_step or not _reproducible(observation, len(found.images)):
        return nothing
    tokenizer = _tokenizer(observation)
    compared = _compared(observation, tokenizer)

    def residual(image: Tensor) -> tuple[float, float, dict[str, Tensor]]:
        """With the size of what was compared, and that itself."""
        recomputed = _encoder_gradients(observation, image, compared, tokenizer)
        held = {name: compared[name] for name in recomputed}
        size, left = _norm(held), _norm({name: gradient - held[name] for name, gradient in recomputed.items()})
        return left / size if size > 0 else math.inf, size, held

    least, size, held = residual(found.images)
    if math.isinf(least):
        return nothing
    agrees = _agrees(observation, found, held, least, size)
    return agrees and _tells_apart(found.images, least, lambda image: residual(image)[0]), least


def _agrees(
    observation: Observation, found: Reconstruction, compared: Mapping[str, Tensor], residual: float, size: float
) -> bool:
    """Whether a relative residual over gradients of norm `size` certifies the answer."""
    if ORDER_GUESSED in found.flags:
        return False
    if not TOLERANCE < residual < DOUBTFUL:
        return residual <= TOLERANCE
    return residual <= ROUND_OFF_UNITS * _rounding(observation, compared) / size


def _tells_apart(images: Tensor, residual: float, residual_of: Callable[[Tensor], float]) -> bool:
    """Whether the gradient depends on the images so much that a wrong answer would leave more than this one does.

    Measured between the answer and images that are black, or white, whichever is further away: what is left of an error
    that makes an image unrecognisable, in proportion.
    """
    other = (images.flatten(1).mean(dim=1) < 0.5).to(images)[:, None, None, None].expand_as(images)
    distance = float((images - other).square().mean().sqrt())
    return APART * residual <= residual_of(other) * VOUCHED_DEVIATION / distance


def reproduce(observation: Observation, images: Tensor) -> tuple[float, float]:
    """Compare the gradient of the client's own batch with the one received, to find out whether inputs fit together.

    Args:
        observation: one update; labels that it holds are those of `images`, in their order. Without labels they are
            inferred, as far as `certify` does.
        images: (B, C, H, W) in [0, 1].

    Returns:
        The relative residual as `certify` measures it, and the factor by which the recomputed gradient has to be
        multiplied to come nearest to the one received, applied before the residual is taken; (NaN, NaN) where the step
        cannot be repeated.
    """
    if not _repeatable(observation, len(images)) or (observation.labels is None and len(images) > LARGEST_BATCH):
        return float("nan"), float("nan")
    observation = without_frozen(observation)
    tokenizer = _tokenizer(observation)
    compared = _compared(observation, tokenizer)
    size, found = _norm(compared), []
    orders = None if observation.labels is None else [tuple(observation.labels.tolist())]
    for gradients in _gradients(observation, images, compared, tokenizer, None, orders) if size > 0 else ():
        square = _norm(gradients) ** 2
        product = sum(float((g.double() * compared[n].double()).sum()) for n, g in gradients.items())
        factor = product / square if square > 0 else float("nan")
        found.append((_norm({n: factor * g - compared[n] for n, g in gradients.items()}) / size, factor))
    return min(found, default=(float("nan"), float("nan")))


def _compared(observation: Observation, tokenizer: Tokenizer | None) -> dict[str, Tensor]:
    """The gradients that only the classification loss reaches."""
    tables = () if tokenizer is None else (tokenizer.positions, tokenizer.shared_position)
    localisation = f"{tokenizer.localisation}." if tokenizer is not None and tokenizer.localisation else None
    return {
        name: gradient
        for name, gradient in observation.gradients.items()
        if name not in tables and not (localisation and name.startswith(localisation))
    }


def _rounding(observation: Observation, compared: Mapping[str, Tensor]) -> float:
    """Norm of the error that the message's precision leaves in the compared gradients, by expectation."""
    return sum(observation.once(_expected_square, name) for name in compared) ** 0.5


def _expected_square(observation: Observation, name: str) -> float:
    """Squared norm of the error that precision leaves in one gradient, by expectation."""
    return float(error_bounds(observation, name).square().sum()) / 3


def _reproducible(observation: Observation, count: int) -> bool:
    """Whether steps on `count` images, in some order, are what the client may have done."""
    return count <= LARGEST_BATCH and _repeatable(observation, count)


def _repeatable(observation: Observation, count: int) -> bool:
    known = observation.local_steps == 1 or returns_weights(observation)
    supervised = observation.objective == SUPERVISED and count == observation.num_examples
    norms = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in observation.model.modules())
    return known and supervised and not norms


def _tokenizer(observation: Observation) -> Tokenizer | None:
    try:
        return find_tokenizer(observation.model, observation.image_shape)
    except UsageError:
        return None


def _gradients(
    observation: Observation,
    images: Tensor,
    compared: Mapping[str, Tensor],
    tokenizer: Tokenizer | None,
    inferred: Tensor | None,
    orders: Iterable[tuple[int, ...]] | None = None,
) -> Iterator[dict[str, Tensor]]:
    """The client's gradient on the reconstruction, for the given orders of the labels or for every one."""
    with _differentiable(observation, compared) as parameters, torch.enable_grad():
        inputs, extra = _normalised(observation, images), _mask(observation, tokenizer, len(images))
        logits = logits_of(observation.model(inputs, **extra))
        if orders is None:
            labels = observation.labels if observation.labels is not None else inferred
            labels = _labels(observation, compared, len(images)) if labels is None else labels
            orders = set(permutations(labels.tolist())) if labels is not None else ()
        for order in orders:
            if observation.local_steps > 1:
                summed = _local_steps(observation, inputs, torch.tensor(order, device=logits.device), extra)
                yield {name: summed[name] for name in parameters}
                continue
            loss = functional.cross_entropy(logits, torch.tensor(order, device=logits.device))
            found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
            pairs = zip(parameters.items(), found, strict=True)
            yield {n: torch.zeros_like(p) if g is None else g for (n, p), g in pairs}


def _encoder_gradients(
    observation: Observation, image: Tensor, compared: Mapping[str, Tensor], tokenizer: Tokenizer | None
) -> dict[str, Tensor]:
    """The encoder's gradient on the reconstruction (1, C, H, W), from the received one of the last norm's bias.

    Empty where the model ends in no layer norm whose tokens are read alike, or the update lacks that bias.
    """
    with _differentiable(observation, compared) as parameters, torch.enable_grad():
        with _recorded_norms(observation.model) as calls:
            inputs, extra = _normalised(observation, image), _mask(observation, tokenizer, 1)
            logits = logits_of(observation.model(inputs, **extra))
        bias, tokens = calls[-1] if calls else ("", logits)  # (1, T, D), or (1, D)
        if bias not in parameters:
            return {}
        even = functional.log_softmax(logits - logits.detach(), -1)  # a saturated model has no slope of its own
        slopes = torch.autograd.grad(even[0, 0], tokens, retain_graph=True)[0]
        slopes = slopes.flatten(0, -2)  # (T, D)
        total = slopes.sum(dim=0)
        weights = slopes @ total / total.square().sum()  # (T,)
        if not (slopes - weights[:, None] * total).norm() < TOLERANCE * slopes.norm():
            return {}
        carried = (weights[:, None] * compared[bias].to(weights)).view_as(tokens)
        names = [name for name in parameters if name != bias]
        found = torch.autograd.grad(tokens, [parameters[n] for n in names], carried, allow_unused=True)
    return {name: gradient for name, gradient in zip(names, found, strict=True) if gradient is not None}


@contextmanager
def _recorded_norms(model: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """Context in which each layer norm's call is recorded: the name of its bias, and its output."""
    calls: list[tuple[str, Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: calls.append((f"{name}.bias", output)))
        for name, module in model.named_modules()
        if isinstance(module, nn.LayerNorm)
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _differentiable(observation: Observation, compared: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Context in which the model's parameters that are in `compared` require gradients; they, by name."""
    parameters = {n: p for n, p in observation.model.named_parameters() if n in compared}
    required = {n: p.requires_grad for n, p in parameters.items()}
    try:
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        yield parameters
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(required[name])


def _normalised(observation: Observation, images: Tensor) -> Tensor:
    """Images (B, C, H, W) in [0, 1] as the model's input, in its type and on its device."""
    like, shape = next(observation.model.parameters()), (1, -1, 1, 1)
    mean, std = (
        torch.tensor(v, dtype=like.dtype, device=like.device).view(shape) for v in (observation.mean, observation.std)
    )
    return (images.to(like) - mean) / std


def _local_steps(
    observation: Observation, inputs: Tensor, labels: Tensor, extra: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Sum of the gradients of all local steps of SGD on one batch, by parameter.

    Parameters of which the update holds nothing, or zeros, stay as they are: the client froze them.

    Args:
        inputs, labels: (B, C, H, W) normalised and (B,).
        extra: keyword arguments of the forward pass.
    """
    weights = {name: parameter.detach() for name, parameter in observation.model.named_parameters()}
    total = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    rates = {name: observation.learning_rate * bool(gradient.any()) for name, gradient in observation.gradients.items()}
    for _ in range(observation.local_steps):
        moved = {n: (w - rates.get(n, 0.0) * total[n]).requires_grad_() for n, w in weights.items()}
        logits = logits_of(functional_call(observation.model, moved, (inputs,), dict(extra)))
        loss = functional.cross_entropy(logits, labels)
        found = torch.autograd.grad(loss, list(moved.values()), allow_unused=True)
        total = {n: t if g is None else t + g for (n, t), g in zip(total.items(), found, strict=True)}
    return total


def _mask(observation: Observation, tokenizer: Tokenizer | None, count: int) -> dict[str, Tensor]:
    """Keyword arguments of the forward pass: the mask of positions, where the update shows one."""
    if tokenizer is None or tokenizer.mask_argument is None:
        return {}
    rows = position_gradient(observation, tokenizer)
    if rows is None:
        return {}
    masked = masked_rows(rows[tokenizer.prefix :])
    return tokenizer.mask_kwargs(masked.expand(count, -1)) if masked.any() else {}


def _labels(observation: Observation, compared: Mapping[str, Tensor], count: int) -> Tensor | None:
    """(B,) labels from the gradient of the classifier's bias, p - y: negative at the labels (Zhao et al. 2020, iDLG).

    None where the update lacks it, or where it does not name as many classes as there are images.
    """
    gradient = compared.get(f"{find_classifier(observation)}.bias")
    if gradient is None:
        return None
    negative = (gradient < 0).nonzero().flatten()
    return negative if len(negative) == count else negative.repeat(count) if len(negative) == 1 else None


def _norm(gradients: Mapping[str, Tensor]) -> float:
    """Euclidean norm to a relative 1e-5, a hundredth of `TOLERANCE`: each tensor's in at least float32."""
    single = torch.float32
    norms = (
        torch.linalg.vector_norm(g.detach(), dtype=torch.promote_types(g.dtype, single)) for g in gradients.values()
    )
    return sum(float(norm) ** 2 for norm in norms) ** 0.5
