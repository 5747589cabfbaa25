"""Partitions: disjoint, complete, reproducible, with the requested label skew."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attacks.registry import UsageError
from fedmjp.data import partition
from fedmjp.data.partitioning import PartitionStatistics, statistics

LABELS = np.repeat(np.arange(10), 200)


def largest_share(labels, parts):
    """Mean over clients of the share of a client's commonest class, 0.1 (even) to 1 (one class each)."""
    return np.mean([np.bincount(labels[part]).max() / len(part) for part in parts])


def check_division(parts, clients, count):
    assert len(parts) == clients
    assert min(len(part) for part in parts) >= 1
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(count))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_iid_divides_evenly(data):
    labels = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=60))
    clients = data.draw(st.integers(1, len(labels)))
    parts = partition(labels, clients, "iid", data.draw(st.integers(0, 2**31)))
    check_division(parts, clients, len(labels))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=25, deadline=None)
@given(
    # Enough images that one of the partitioner's eleven draws almost certainly gives every client an image.
    labels=st.lists(st.integers(0, 4), min_size=80, max_size=120),
    clients=st.integers(1, 4),
    alpha=st.floats(0.5, 1e6),
    seed=st.integers(0, 2**31),
)
def test_dirichlet_divides_and_covers(labels, clients, alpha, seed):
    check_division(partition(labels, clients, f"dirichlet:{alpha}", seed), clients, len(labels))


@pytest.mark.parametrize("spec", ["iid", "dirichlet:0.3", "dirichlet:100"])
def test_same_seed_same_partition(spec):
    first, second, other = (partition(LABELS, 8, spec, seed) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    check_division(first, 8, len(LABELS))
    assert all(part.dtype == np.int64 for part in first)


def test_skew_grows_as_alpha_falls():
    skew = [
        np.mean([largest_share(LABELS, partition(LABELS, 8, spec, seed)) for seed in range(3)])
        for spec in ("iid", "dirichlet:100", "dirichlet:1", "dirichlet:0.1")
    ]
    assert skew[0] < 0.16
    assert skew[1] < 0.16
    assert skew[1] + 0.05 < skew[2] < skew[3] - 0.15
    assert skew[3] > 0.45


def test_iid_is_shuffled_and_takes_tensors():
    parts = partition(torch.from_numpy(LABELS), 10, "iid", 0)
    assert all(len(np.unique(LABELS[part])) == 10 for part in parts)


@pytest.mark.parametrize(
    ("clients", "spec", "advice"),
    [
        (0, "iid", "at least 1"),
        (-2, "dirichlet:1", "at least 1"),
        (11, "iid", "fewer clients or load more images"),
        (11, "dirichlet:1", "fewer clients or load more images"),
        (2, "dirichlet:0", "number above 0"),
        (2, "dirichlet:-1", "number above 0"),
        (2, "dirichlet:nan", "number above 0"),
        (2, "dirichlet:inf", "use iid"),
        (2, "dirichlet:much", "as in dirichlet:0.5"),
        (2, "dirichlet:", "as in dirichlet:0.5"),
        (2, "dirichlet", "choose from: iid, dirichlet:ALPHA"),
        (2, "shards", "choose from: iid, dirichlet:ALPHA"),
        (2, "", "choose from: iid, dirichlet:ALPHA"),
        (9, "dirichlet:0.001", "raise ALPHA, ask for fewer clients or load more images"),
    ],
)
def test_invalid_arguments_raise_one_line_that_says_what_to_do(clients, spec, advice):
    with pytest.raises(UsageError, match=advice) as caught:
        partition([0, 1] * 5, clients, spec, 0)
    assert "\n" not in str(caught.value)


def test_statistics_of_a_partition() -> None:
    labels = [0, 0, 1, 1, 2, 2]
    even = statistics(labels, [np.array([0, 2, 4]), np.array([1, 3, 5])])
    assert even == PartitionStatistics(2, (3, 3.0, 3), (3, 3.0, 3), 0.0)
    skewed = statistics(labels, [np.array([0, 1]), np.array([2, 3, 4, 5])])
    assert (skewed.images, skewed.classes) == ((2, 3.0, 4), (1, 1.5, 2))
    # Class shares (1, 0, 0) and (0, 1/2, 1/2) against thirds: 2/3 and 1/3.
    assert skewed.skew == pytest.approx(0.5)
    assert skewed.words().startswith("2 clients with 2 to 4 images (median 3) of 1 to 2 classes (median 1.5)")
