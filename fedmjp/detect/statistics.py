"""Statistics of a received model, each a number that grows with what a server must do to read single images.

All are in [0, 1] but `bias_range`. Each names what it found it in (a layer, a row), and makes no statement, with the
reason, where what it needs is not there.

What they look for: the classifier of fishing (Wen et al. 2022, "Fishing for User Data in Large-Batch Federated
Learning via Gradient Magnification") has all rows but one at zero and one bias far from the others (`row_norms`,
`row_spread`, `dead_rows`, `bias_range`), so that single images send all of a batch's gradient (`concentration`) and the
others nothing (`silent_images`). Bins (Fowl et al. 2022, "Robbing the Fed") are rows of one direction (`bins`).
Whatever is planted changes the model (`distance`).

That a client can see one image outweigh the others in its own gradients is the idea of D-SNR (Garov et al. 2024,
"Hiding in Plain Sight", arXiv:2306.03013): the largest ratio, over the layers, of one image's gradient norm to those of
the others. `concentration` departs from it: one ratio of all layers below the classifier, as a share between 0 and 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from attacks.registry import Registry
from fedmjp.detect.received import Received

DEAD = 1e-2  # of the largest row's norm: a row below is dead
PARALLEL = 0.98  # |cosine| from which on two rows are parallel
SILENT = 1e-6  # of an image's gradient at the classifier: what is below it gets nothing
# Fewest rows and columns of a layer in which parallel rows, and a large change, are no accident. Two classes have
# opposite rows; low-rank factors and adapters start at zero, and honest training turns and doubles them in early rounds
# (of LoRA of rank 8 up to 45 % parallel rows, and a change of 0.58).
LEAST_SIDE = 32

STARTS_AT_ZERO = (
    "the classifier {layer} is zero in the first model that the client was sent: below it no image sends a gradient in "
    "this step. Some models start so, and a server can silence a client so; this model alone does not "
    "say which"
)
FIRST_ROUND = "the first model that the client was sent: nothing to compare it with"
NOT_BEFORE = "{name} is not in the last model that the client was sent, or has another shape there"
COMPUTED = "{name} is computed from other parameters, which the last model does not give"
NO_CLASSIFIER = "the model's logits are not the output of one linear layer"
NO_BATCH = "no gradients of single images at hand"
# Names under which `nn.MultiheadAttention` holds its projections.
PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


@dataclass(frozen=True)
class Measurement:
    """What a statistic says of a received model.

    Attributes:
        value: None for no statement.
        about: where it was found, or why there is no statement.
        warning: what the client should know beside it, in words; "" for nothing.
    """

    value: float | None
    about: str = ""
    warning: str = ""


class Statistic(ABC):
    """One number of a received model; a larger one is more suspicious.

    Attributes:
        most: its largest value, infinity for none.
        least: the smallest threshold that makes sense: what lies below can be an accident.
    """

    most: ClassVar[float] = 1.0
    least: ClassVar[float] = 0.05

    @abstractmethod
    def measure(self, received: Received) -> Measurement:
        """The statistic of a received model.

        Raises:
            UsageError: the gradients of single images cannot be computed.
        """


STATISTICS: Registry[type[Statistic]] = Registry("statistic")


@STATISTICS.register("row_norms")
class RowNorms(Statistic):
    """Largest change of a norm of the classifier's rows since the last model, |a - b| / max(a, b).

    1 for a classifier that the last model lacks, or has in another shape.
    """

    def measure(self, received: Received) -> Measurement:
        """See `Statistic.measure`."""
        if received.classifier is None:
            return Measurement(None, NO_CLASSIFIER)
        name = f"{received.layer}.weight"
        if received.is_new(name):
            return Measurement(self.most, NOT_BEFORE.format(name=name))
        before = received.before(name)
        if before is None:
            return Measurement(None, FIRST_ROUND if received.previous is None else COMPUTED.format(name=name))
        now, then = row_norms(received.classifier.weight), row_norms(before)
        if not then.any():
            return Measurement(None, f"{received.layer} was zero before, which gives no scale")
        largest = torch.maximum(now, then)
        change = (now - then).abs() / largest.clamp(min=torch.finfo(largest.dtype).tiny)
        return Measurement(float(change.max()), f"row {int(change.argmax())} of {received.layer}")


@STATISTICS.register("row_spread")
class RowSpread(Statistic):
    """How far the largest row of the classifier is above the median one: 1 - median / largest of the rows' norms."""

    def measure(self, received: Received) -> Measurement:
        """See `Statistic.measure`."""
        if received.classifier is None:
            return Measurement(None, NO_CLASSIFIER)
        found = row_norms(received.classifier.weight)
        if not found.any():
            return Measurement(0.0, f"{received.layer} is zero")
        return Measurement(float(1 - found.median() / found.max()), f"row {int(found.argmax())} of {received.layer}")


@STATISTICS.register("dead_rows")
class DeadRows(Statistic):
    """Largest share of dead rows in a linear, convolutional or attention layer; NaN where a weight is not finite.

    A layer that is zero as a whole is left out, because layers start so (LoRA's, some classifiers). Not so the
    classifier after the first round, since honest training moves it in the first, and all layers of a model together.
    """

    def measure(self, received: Received) -> Measurement:
        """See `Statistic.measure`."""
        shares, zero = {}, []
        for name, weight in matrices(received.module):
            found = row_norms(weight)
            if found.any():
                dead = (found < DEAD * found.max()).double().mean()
                shares[name] = float(dead) if found.isfinite().all() else math.nan
            else:
                zero.append(name)
        if len(zero) > 1 and not shares:
            return Measurement(1.0, "every layer is zero")
        classifier = f"{received.layer}.weight"
        starts = classifier in zero and received.previous is None
        if classifier in zero and not starts:
            shares[classifier] = 1.0
        largest = _largest(shares)
        return replace(largest, warning=STARTS_AT_ZERO.format(layer=received.layer) if starts else "")


@STATISTICS.register("bins")
class Bins(Statistic):
    """Largest share of rows of a layer that are parallel to another row of it, dead rows left out."""

    least: ClassVar[float] = 0.2  # 26 of the 576 rows of a public ViT-Ti's first queries, keys and values are parallel

    def measure(self, received: Received) -> Measurement:
        """See `Statistic.measure`."""
        shares = {}
        for name, weight in matrices(received.module):
            if min(weight.shape) >= LEAST_SIDE:
                shares[name] = parallel_share(weight)
        return _largest(shares)


@STATISTICS.register("distance")
class Distance(Statistic):
    """Largest change of the weight of a layer (`matrices`) since the last model, |a - b| / (|a| + |b|).

    In Euclidean norms. Layers that were zero have no scale and are left out, as are small ones (`LEAST_SIDE`) but for
    the classifier. A layer of any size that the last model lacks, or has in another shape, counts as changed by 1.
    """

    def measure(self, received: Received) -> Measurement:
        """See `Statistic.measure`."""
        if received.previous is None:
            return Measurement(None, FIRST_ROUND)
        changes = {}
        for name, now in matrices(received.module):
            if received.is_new(name):
                return Measurement(self.most, NOT_BEFORE.format(name=name))
            before = received.before(name)
            counts = min(now.shape) >= LEAST_SIDE or name == f"{received.layer}.weight"
            if counts and before is not None and before.any():
                changes[name] = relative_change(now, before.reshape(now.shape))
        return _largest(changes)


@STATISTICS.register("bias_range")
class BiasRange(Statistic):
    """Difference of the classifier's largest and smallest bias, in logits."""

    most: ClassVar[float] = float("inf")
    least: ClassVar[float] = 0.3  # torch's initialisation of a layer with D inputs spreads over 2 / sqrt(D): 0.25 at 64

    def measure(self, received: Received) -> Measurement:
        """See `Statistic.measure`."""
        if received.classifier is None:
            return Measurement(None, NO_CLASSIFIER)
        bias = received.classifier.bias
        if bias is None:
            return Measurement(None, f"{received.layer} has no bias")
        return Measurement(float((bias.max() - bias.min()).detach()), received.layer)


@STATISTICS.register("concentration")
class Concentration(Statistic):
    """How much of the batch's gradient below the classifier one image sends.

    (s - 1/B) / (1 - 1/B) with s the largest image's share of the sum of the images' gradient norms, B the images: 0
    where all send equally much, 1 where one alone does.
    """

    def measure(self, received: Received) -> Measurement:
        """See `Statistic.measure`."""
        images = received.images
        if images is None:
            return Measurement(None, NO_BATCH)
        count = len(images.below)
        if count < 2:
            return Measurement(None, "a batch of one image: its share is the whole, whatever was sent")
        if not images.below.any():
            return Measurement(None, "no image of the batch sends a gradient below the classifier")
        share = float(images.below.max() / images.below.sum())
        return Measurement((share - 1 / count) / (1 - 1 / count), f"image {int(images.below.argmax())} of {count}")


@STATISTICS.register("silent_images")
class SilentImages(Statistic):
    """Share of the batch's images whose gradient stops at the classifier: nothing of it reaches what is below.

    A classifier that starts at zero stops that of every image. In a first round those count instead of which nothing
    reaches the classifier that tells them from the others (`same_features`).
    """

    def measure(self, received: Received) -> Measurement:
        """See `Statistic.measure`."""
        images = received.images
        if images is None or received.classifier is None:
            return Measurement(None, NO_BATCH if images is None else NO_CLASSIFIER)
        sends = images.classifier > 0
        if not sends.any():
            return Measurement(None, "no image sends a gradient at the classifier")
        silent = images.below < SILENT * images.classifier
        if received.previous is None and not received.classifier.weight.any():
            if images.features is None:
                return Measurement(None, f"{received.layer} is zero, so that no image sends anything below it")
            silent = same_features(images.features)
        silent &= sends
        return Measurement(float(silent.double().mean()), f"{int(silent.sum())} of {len(silent)} images")


def same_features(features: Tensor) -> Tensor:
    """Of which images (B,) the features (B, D) are zero, or those that all images have, to within `SILENT`."""
    sizes = torch.linalg.vector_norm(features, dim=1)
    spread = torch.linalg.vector_norm(features - features.mean(dim=0), dim=1)
    return (sizes == 0) | ((spread <= SILENT * sizes) & (len(features) > 1))


def matrices(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and weight (rows, columns) of linear, convolutional and attention layers, kernels of convolutions flattened.

    Of attention layers (`nn.MultiheadAttention`) the projections of queries, keys and values, in one matrix where the
    layer holds them in one.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d):
            own = ("weight",)
        else:
            own = PROJECTIONS if isinstance(part, nn.MultiheadAttention) else ()
        for weight in own:
            if getattr(part, weight) is not None:
                yield f"{name}.{weight}".removeprefix("."), getattr(part, weight).detach().flatten(1)


def unread_weights(module: nn.Module) -> tuple[str, ...]:
    """Names of parameters of two or more dimensions that are none of `matrices`, as tables of positions."""
    read = {name for name, _ in matrices(module)}
    return tuple(name for name, value in module.named_parameters() if value.ndim > 1 and name not in read)


def relative_change(now: Tensor, then: Tensor) -> float:
    """|a - b| / (|a| + |b|) in Euclidean norms, computed in float64; NaN where a number is not finite."""
    now, then = now.double(), then.double()
    return float((now - then).norm() / (now.norm() + then.norm()))


def row_norms(weight: Tensor) -> Tensor:
    """Euclidean norms of the rows of (K, D), (K,) float64."""
    return torch.linalg.vector_norm(weight.detach(), dim=1, dtype=torch.float64)


def parallel_share(weight: Tensor) -> float:
    """Share of the rows of (K, D) with |cosine| of `PARALLEL` or more to another row; dead rows count as not parallel.

    NaN where a weight is not finite. Memory: K * K numbers.
    """
    found = row_norms(weight)
    if not found.isfinite().all():
        return math.nan
    alive = found >= DEAD * found.max().clamp(min=torch.finfo(torch.float64).tiny)
    rows = (weight[alive] / found[alive, None]).to(weight)
    cosines = (rows @ rows.T).abs().fill_diagonal_(0.0)
    return float((cosines >= PARALLEL).any(dim=1).sum()) / len(weight) if len(rows) else 0.0


def _largest(values: dict[str, float]) -> Measurement:
    """The largest of the weights' values, with the weight's name; NaN if one is NaN."""
    if not values:
        return Measurement(None, "no layer to measure it in")
    name = max(values, key=lambda name: (math.isnan(values[name]), values[name]))
    return Measurement(values[name], name)
