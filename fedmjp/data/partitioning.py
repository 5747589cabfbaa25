"""Partition of the images among clients, by Flower's partitioners, as index arrays.

"iid" shuffles and divides evenly. "dirichlet:ALPHA" draws each class's shares over the clients from Dirichlet(ALPHA)
(Yurochkin et al. 2019, arXiv:1905.12022): the smaller ALPHA, the larger the label skew.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attacks.registry import UsageError
from fedmjp.errors import needs_extra

if TYPE_CHECKING:
    import torch
    from flwr_datasets.partitioner import Partitioner

CHOICES = "iid, dirichlet:ALPHA"
# Above this value the shares are practically equal, and for much larger values numpy's sampler overflows to zero
# shares.
LARGEST_ALPHA = 1e6


def partition(
    labels: Sequence[int] | np.ndarray | torch.Tensor, clients: int, spec: str, seed: int
) -> list[np.ndarray]:
    """Divide the indices 0..n-1 of `labels` among `clients`, at least one each.

    Args:
        labels: n class indices.
        clients: number of clients, 1..n.
        spec: "iid" or "dirichlet:ALPHA" with 0 < ALPHA <= 1e6.
        seed: determines the partition.

    Returns:
        One sorted int64 array per client; together they hold every index once.

    Raises:
        UsageError: unknown `spec`, ALPHA out of range, fewer than one client, more clients than images, or an ALPHA so
            small that a client has no image after the partitioner's repeated draws.
    """
    alpha = read_alpha(spec)
    labels = np.asarray(labels, dtype=np.int64)  # (n,)
    if clients < 1:
        raise UsageError(f"{clients} clients cannot share data; ask for at least 1")
    if clients > len(labels):
        raise UsageError(f"{clients} clients but only {len(labels)} images; ask for fewer clients or load more images")
    with needs_extra("federation", "dealing out data among clients"):
        from datasets import Dataset
        from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner

    examples = Dataset.from_dict({"label": labels, "index": np.arange(len(labels))})
    if alpha is None:
        return _divide(IidPartitioner(num_partitions=clients), examples.shuffle(seed=seed), clients)
    partitioner = DirichletPartitioner(
        num_partitions=clients,
        partition_by="label",
        alpha=alpha,
        min_partition_size=1,
        self_balancing=False,
        seed=seed,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _divide(partitioner, examples, clients)
    except ValueError as error:
        raise UsageError(
            f"{spec!r} leaves one of {clients} clients without an image of {len(labels)} after repeated draws; "
            f"raise ALPHA, ask for fewer clients or load more images"
        ) from error


@dataclass(frozen=True)
class PartitionStatistics:
    """How images are divided among clients.

    Attributes:
        clients: number of clients.
        images: fewest, median and most images of a client.
        classes: fewest, median and most classes of which a client holds an image.
        skew: mean over clients of the total variation distance, in [0, 1], of the client's shares of the classes from
            those of all images; 0 if all clients hold the same shares.
    """

    clients: int
    images: tuple[int, float, int]
    classes: tuple[int, float, int]
    skew: float

    def words(self) -> str:
        """One sentence."""
        (few, middle, most), (low, usual, high) = self.images, self.classes
        return (
            f"{self.clients} clients with {few} to {most} images (median {middle:g}) of {low} to {high} classes "
            f"(median {usual:g}); total variation distance of a client's class shares from those of all images: "
            f"{self.skew:.2f} on average"
        )


def statistics(labels: Sequence[int] | np.ndarray | torch.Tensor, parts: Sequence[np.ndarray]) -> PartitionStatistics:
    """Statistics of a partition.

    Args:
        labels: (n,) class indices.
        parts: the indices of each client, from `partition`.
    """
    labels = np.asarray(labels, dtype=np.int64)
    counts = np.stack([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])  # (clients, classes)
    shares, whole = counts / counts.sum(axis=1, keepdims=True), counts.sum(axis=0) / counts.sum()
    images, classes = counts.sum(axis=1), (counts > 0).sum(axis=1)
    spans = [(int(n.min()), float(np.median(n)), int(n.max())) for n in (images, classes)]
    return PartitionStatistics(len(parts), *spans, float(np.abs(shares - whole).sum(axis=1).mean() / 2))


def read_alpha(spec: str) -> float | None:
    """ALPHA of "dirichlet:ALPHA", None for "iid".

    Raises:
        UsageError: any other spec, or an ALPHA that is not in (0, 1e6].
    """
    if spec == "iid":
        return None
    kind, colon, value = spec.partition(":")
    if kind != "dirichlet" or not colon:
        raise UsageError(f"unknown partition {spec!r}; choose from: {CHOICES}")
    try:
        alpha = float(value)
    except ValueError:
        alpha = float("nan")
    if not 0 < alpha <= LARGEST_ALPHA:
        raise UsageError(
            f"ALPHA of {spec!r} must be a number above 0 and at most {LARGEST_ALPHA:.0e}, as in dirichlet:0.5; "
            f"for an even division use iid"
        )
    return alpha


def _divide(partitioner: Partitioner, examples: object, clients: int) -> list[np.ndarray]:
    partitioner.dataset = examples
    return [np.sort(np.asarray(partitioner.load_partition(k)["index"][:], dtype=np.int64)) for k in range(clients)]
