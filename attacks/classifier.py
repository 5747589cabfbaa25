"""What the classifier's gradient alone tells of a step: whether it is a sum of several, and its scale.

For one image with features h, the classifier's logits are W h + b and the cross-entropy's gradients are

    dL/dW = (p - y) h^T,    dL/db = p - y,    p = softmax(W h + b).

[dL/dW, dL/db] therefore has rank one (as for any loss on the logits), and its right factor is [h, 1]: it gives h, h and
the sent W and b give p, and p - y is known up to the label, so that its scale is. Every further image or step adds one
direction: the rank above the noise is the least number of images times steps that were summed. Both need neither the
image nor an attack, hold for a frozen trunk and for dropout, and are what a closed form cannot see by itself: where
there are as many tokens as channels its equations have a solution for any update.

The idea that this layer gives the features away is that of Zhu et al. 2019 and Zhao et al. 2020 (iDLG), who use it for
labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call

from attacks.observation import Observation
from attacks.tokenizer import logits_of

# Units of round-off, and of the error that sums over the classes show, below which a singular value counts as error.
ROUND_OFF_UNITS, EDGE = 4.0, 2.0
# Share of dL/db that p - y may leave unexplained.
MISFIT = 1e-2
# The classifiers found, by model and shape of its images: which layer it is does not depend on the weights.
_CLASSIFIERS: WeakKeyDictionary[nn.Module, dict[tuple[int, int, int], str | None]] = WeakKeyDictionary()
# Classes from which on smoothed labels, two numbers more, leave something to check.
LEAST_SMOOTHED = 5


@dataclass(frozen=True)
class Step:
    """What the classifier's gradient says of the step behind an update.

    Attributes:
        terms: different (p - y) h^T that it is a sum of, at least.
        factor: by which the update exceeds one step's gradient of the mean cross-entropy (of smoothed labels too); NaN
            where there are several terms, without a bias, or where the loss is another one.
    """

    terms: int
    factor: float


def read_step(observation: Observation, relative_error: float = 0.0) -> Step | None:
    """What the classifier's gradient says of the step; None where it cannot show more terms than one (two classes).

    None too where the update lacks the classifier's weight, or the model's logits are no linear layer's output.

    Args:
        relative_error: of the gradient by its precision, where the sums over the classes may not show it all.
    """
    layer, weight = find_classifier(observation), classifier_weight(observation)
    if weight is None or min(weight.shape) < 3:
        return None
    bias = observation.gradients.get(f"{layer}.bias")
    gradient = _stacked(weight, bias)
    module = observation.model.get_submodule(layer)
    _, sizes, right = torch.linalg.svd(gradient, full_matrices=False)
    error = max(gradient_error(observation, gradient, module.weight), relative_error * float(sizes[0]))
    terms = max(1, int((sizes > error).sum()))
    if terms > 1 or bias is None or module.bias is None:
        return Step(terms, float("nan"))
    features = right[0, :-1] / right[0, -1]
    logits = module.weight.detach().double() @ features + module.bias.detach().double()
    if not logits.isfinite().all():  # the bias' gradient was not sent (top-k): nothing shows the scale
        return Step(terms, float("nan"))
    return Step(terms, _factor(gradient[:, -1], logits.softmax(dim=0)))


def classifier_gradient(observation: Observation) -> Tensor | None:
    """[dL/dW, dL/db] of the classifier, (K, D + 1) float64; None where one of them was not sent, or is zero."""
    parts = [_classifier_part(observation, kind) for kind in ("weight", "bias")]
    return None if any(part is None for part in parts) else _stacked(*parts)


def classifier_weight(observation: Observation) -> Tensor | None:
    """dL/dW of the classifier, (K, D); None where it was not sent, or is zero."""
    return _classifier_part(observation, "weight")


def _classifier_part(observation: Observation, kind: str) -> Tensor | None:
    layer = find_classifier(observation)
    gradient = None if layer is None else observation.gradients.get(f"{layer}.{kind}")
    return None if gradient is None or not gradient.any() else gradient


def _stacked(weight: Tensor, bias: Tensor | None) -> Tensor:
    """[dL/dW, dL/db], (K, D + 1) float64; (K, D) without a bias."""
    parts = [weight.double()] + ([] if bias is None else [bias.double()[:, None]])
    return torch.cat(parts, dim=1)


def find_classifier(observation: Observation) -> str | None:
    """Name of the linear layer whose output, for one image, are the model's logits; None where there is none.

    See `classifier_of`.
    """
    return classifier_of(observation.model, observation.image_shape)


def classifier_of(model: nn.Module, image_shape: tuple[int, int, int]) -> str | None:
    """`find_classifier` of a model for images (C, H, W).

    One forward pass on a grey image, once for each model, which keeps its buffers (averages of batch norms).
    """
    known = _CLASSIFIERS.setdefault(model, {})
    if image_shape not in known:
        known[image_shape] = _find_classifier(model, image_shape)
    return known[image_shape]


def _find_classifier(model: nn.Module, image_shape: tuple[int, int, int]) -> str | None:
    like = next(model.parameters())
    image = torch.zeros(1, *image_shape, dtype=like.dtype, device=like.device)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with torch.no_grad():
            return layer_of_logits(model, lambda: logits_of(functional_call(model, buffers, image)))
    except Exception:  # a model that takes no bare image says nothing of its classifier
        return None


def layer_of_logits(model: nn.Module, forward: Callable[[], Tensor]) -> str | None:
    """Name of the linear layer of a model whose output are the logits (B, K) that a forward pass returns, or None.

    Args:
        forward: runs the model.
    """
    outputs: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(lambda _, __, output, name=name: outputs.__setitem__(name, output))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        logits = forward()
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        return None
    equal = (name for name, output in outputs.items() if output.shape == logits.shape and output.equal(logits))
    return next(equal, None)


def gradient_error(observation: Observation, gradient: Tensor, weight: Tensor) -> float:
    """Size of the error of [dL/dW, dL/db] (K, D + 1), as the largest singular value that it may have.

    Over the classes the gradient sums to zero (`attacks.identities`), and independent errors to a vector of their
    Frobenius norm: noise, half precision and quantisation show their size there, whatever the gradient is.
    """
    entry = torch.finfo(torch.float32).eps * float(gradient.square().mean().sqrt())
    if observation.kind == "weights" and observation.learning_rate:
        size = float(weight.detach().double().square().mean().sqrt())
        entry += torch.finfo(torch.float32).eps * size / observation.learning_rate
    rows, columns = gradient.shape
    return max(EDGE * float(gradient.sum(dim=0).norm()), ROUND_OFF_UNITS * entry * (rows**0.5 + columns**0.5))


def _factor(sent: Tensor, probabilities: Tensor) -> float:
    """c for which c (p - y) is the bias gradient (K,) that was sent, y one label or a smoothed one; else NaN."""
    label = torch.zeros_like(probabilities)
    label[sent.argmin()] = 1
    plain = (probabilities - label)[:, None]
    smoothed = torch.stack([probabilities, -label, -torch.ones_like(label)], dim=1)
    for columns in (plain, smoothed) if len(sent) >= LEAST_SMOOTHED else (plain,):
        found = torch.linalg.lstsq(columns, sent[:, None]).solution
        misfit = float((columns @ found - sent[:, None]).norm() / sent.norm())
        if misfit < MISFIT and bool((found > 0).all()):
            return float(found[0])
    return float("nan")
