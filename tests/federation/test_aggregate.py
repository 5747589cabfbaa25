"""Secure aggregation as a view: what the server sees of a group of clients, and what leaks of it."""

from __future__ import annotations

import json

import pytest
import torch

from attacks import ATTACKS, UsageError
from fedmjp import simulate
from fedmjp.audit.aggregate import Aggregation, sum_in_words, summed_clients
from fedmjp.audit.assignment import match
from fedmjp.client import ClientTask
from fedmjp.config import RunConfig, from_flat
from fedmjp.federation import ServerView
from fedmjp.metrics import psnr
from tests.conftest import federated_rounds, observed_update

GROUP = {"clients": 2, "secure_aggregation": 2, "audit_clients": "0", "test_limit": 2}


@pytest.mark.parametrize(("size", "alone", "read"), [(0, False, 0), (1, False, 0), (2, False, 2), (32, True, 32)])
def test_the_size_of_a_sum_is_read_back_from_the_setting(size: int, alone: bool, read: int) -> None:
    assert summed_clients("federation, iid, scored against the original" + sum_in_words(size, alone)) == read


@pytest.mark.parametrize("update", ["gradient", "weights"])
def test_the_observation_of_a_group_is_the_mean_of_the_single_ones(update: str) -> None:
    options = GROUP | {"model": "vit_micro8_32", "clients": 4, "update": update, "train_limit": 8, "batch_size": 2}
    task = ClientTask(from_flat(options), "none")
    _, sent, results = next(federated_rounds(task, 1))
    aggregation = Aggregation(2)
    seen = [aggregation.add(ServerView(1, client, sent, r)) for client, r in enumerate(results)]
    assert [view is None for view in seen] == [True, False, True, False]
    assert [view.members for view in seen if view] == [(0, 1), (2, 3)]
    assert [view.client for view in seen if view] == [0, 1]
    whole = observed_update(task, sent, seen[3].received, 1, client=1, clients=2)
    single = [observed_update(task, sent, received, 1, client=c) for c, received in enumerate(results)]
    assert (whole.num_examples, whole.kind) == (4, update)
    for name, gradient in whole.gradients.items():
        mean = torch.stack([view.gradients[name].double() for view in single[2:]]).mean(dim=0)
        torch.testing.assert_close(gradient.double(), mean, rtol=1e-4, atol=1e-5)


def test_groups_start_anew_in_every_round() -> None:
    aggregation, tensor = Aggregation(2), {"w": torch.ones(1)}
    for number in (1, 2):
        seen = [aggregation.add(ServerView(number, client, {}, tensor)) for client in (1, 4, 5, 7)]
        assert [view.members for view in seen if view] == [(1, 4), (5, 7)]
    assert torch.equal(tensor["w"], torch.ones(1))  # the client's own tensors are left alone


def test_sums_of_two_clients_over_rounds_leak_their_images() -> None:
    """Trained weights; each client has three photographs, which meet different ones of the other client."""
    task = ClientTask(from_flat(GROUP | {"model": "vit_mini_64", "train_limit": 6}), "none")
    aggregation, views = Aggregation(2), []
    for number, sent, updates in federated_rounds(task, 9):
        *_, seen = [aggregation.add(ServerView(number, c, sent, update)) for c, update in enumerate(updates)]
        views.append(observed_update(task, sent, seen.received, number, clients=2))
    found = ATTACKS.get("batch_rounds")()(views)
    originals = torch.cat([task.batch(client, 9, 0).images for client in (0, 1)])
    scores = psnr(found.images[match(found.images, originals)], originals)
    assert float(scores.max()) > 25
    alone = ATTACKS.get("patch_embedding")()(views[-1:])
    assert "images" in alone.diagnosis  # one update of a batch is not determined, and says so


def test_a_run_names_the_view_in_its_rows(tmp_path) -> None:
    out = tmp_path / "run"
    options = ["--model", "vit_mini_32", "--weights", "random", "--rounds", "1", "--test-limit", "4", "--clients", "4"]
    options += ["--attacks", "patch_embedding", "--secure-aggregation", "2", "--out", str(out)]
    assert simulate.main(options) == 0
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert {(r["client"], r["image"]) for r in rows} == {(g, i) for g in (0, 1) for i in (0, 1)}
    assert len({r["image_id"] for r in rows}) == 4
    for row in rows:
        assert "aggregate_only" in row["threat_model"]
        assert row["batch_size"] == 2
        assert row["setting"].endswith("sum of 2 clients")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"secure_aggregation": 9}, "--secure-aggregation 9 makes no equal groups of the 8 clients of a round"),
        ({"secure_aggregation": 3}, "pass a divisor of 8"),
        ({"secure_aggregation": 1}, "from 2 on"),
        ({"secure_aggregation": 4, "audit_clients": "2"}, "--audit-clients 2 is no group of 4 clients; choose from 0"),
        ({"secure_aggregation": 2, "local_epochs": 1, "update": "weights"}, "pass --local-steps instead"),
        ({"secure_aggregation": 2, "least_share": 0.5}, "leave --least-share at 1"),
        ({"grants": "aggregate_only"}, "is set by --secure-aggregation"),
    ],
)
def test_mistakes_are_one_line(options: dict, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        from_flat(options, RunConfig()).validate()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
