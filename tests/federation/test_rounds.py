"""The rounds of a federation compared with a plain PyTorch loop, and the errors for clients that fail."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

from attacks import UsageError
from fedmjp import simulate
from fedmjp.client import ClientTask, float_buffers
from fedmjp.config import RunConfig
from fedmjp.federation import ENGINES, ClientFailure, run_rounds
from tests.federation.conftest import changed


def train(config: RunConfig, defense: str = "none", engine: str = "local"):
    """(updates by (round, client), state by round) of a run."""
    updates, states = {}, {}

    def run(grid) -> None:
        run_rounds(
            grid,
            ClientTask(config, defense),
            defense,
            on_update=lambda v: updates.__setitem__((v.round, v.client), {n: t.clone() for n, t in v.received.items()}),
            on_round=lambda number, state: states.__setitem__(number, {n: t.clone() for n, t in state.weights.items()}),
        )

    ENGINES.get(engine)(run, config.federation.clients, config.client_entropy())
    return updates, states


def state_of(task: ClientTask) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in task.model.module.named_parameters()} | {
        n: b.clone() for n, b in float_buffers(task.model.module).items()
    }


def test_fedsgd_equals_a_plain_loop(small) -> None:
    updates, states = train(small)
    task = ClientTask(small, "none")
    weights = state_of(task)
    for number in (1, 2):
        gradients = [task.update(c, number, weights).tensors for c in range(3)]
        for c in range(3):
            for n, gradient in gradients[c].items():
                # Round 1 starts from identical weights; later rounds differ by the round-off of the mean.
                tolerance = {"rtol": 0, "atol": 0} if number == 1 else {"rtol": 1e-3, "atol": 1e-6}
                torch.testing.assert_close(updates[number, c][n], gradient, **tolerance)
        for n in gradients[0]:
            weights[n] = weights[n] - small.federation.learning_rate * sum(g[n] for g in gradients) / 3
        for n, value in weights.items():
            torch.testing.assert_close(states[number][n], value, rtol=1e-5, atol=1e-7)


def test_fedavg_averages_local_sgd(small) -> None:
    config = changed(small, update="weights", local_steps=2, batch_size=2, rounds=1)
    _, states = train(config)
    task = ClientTask(config, "none")
    start = state_of(task)
    ends = []
    for c in range(3):
        task.load(start)
        optimiser = torch.optim.SGD(task.model.module.parameters(), lr=config.federation.learning_rate)
        for step in range(2):
            batch = task.batch(c, 1, step)
            optimiser.zero_grad()
            logits = task.model.module(task.model.normalise(batch.images))
            torch.nn.functional.cross_entropy(logits, batch.labels).backward()
            optimiser.step()
        ends.append(state_of(task))
    for n in start:
        torch.testing.assert_close(states[1][n], sum(e[n] for e in ends) / 3, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("defense", ["mjp", "noise", "frozen_positions"])
def test_defences_train(small, defense: str) -> None:
    updates, states = train(changed(small, rounds=1), defense)
    assert len(updates) == 3
    assert any(not torch.equal(states[0][n], states[1][n]) for n in states[0])


@pytest.mark.parametrize("model", ["swin_t", "resnet50"])
def test_models_with_buffers_train(small, model: str) -> None:
    _, states = train(changed(small, model=model, clients=2, rounds=1, test_limit=2), "mjp")
    running = [n for n in states[0] if "running_mean" in n]
    assert bool(running) == (model == "resnet50")
    assert all(not torch.equal(states[0][n], states[1][n]) for n in running)


def test_same_seed_same_updates(small) -> None:
    first, second = train(small, "mjp")[0], train(small, "mjp")[0]
    assert first.keys() == second.keys()
    assert all(torch.equal(first[k][n], second[k][n]) for k in first for n in first[k])


def test_sampling_by_partition(small) -> None:
    config = changed(small, clients=6, clients_per_round=2, rounds=3)
    clients = list(train(config)[0])
    assert [r for r, _ in clients] == [1, 1, 2, 2, 3, 3]
    assert all(a < b for (_, a), (_, b) in zip(clients[::2], clients[1::2], strict=True))


def test_a_server_that_selects_its_clients_asks_the_attacked_ones_in_every_round(small) -> None:
    grants = "model_weights,client_selection"
    config = changed(small, clients=6, clients_per_round=3, rounds=4, grants=grants, audit_clients="4,2")
    drawn = [client for _, client in train(config)[0]]
    third = [set(drawn[i : i + 3]) - {2, 4} for i in range(0, 12, 3)]
    assert all(len(one) == 1 for one in third)
    assert len(set.union(*third)) > 1
    assert drawn == [c for i in range(0, 12, 3) for c in sorted(drawn[i : i + 3])]


def test_a_server_that_selects_its_clients_keeps_the_members_of_sums(small) -> None:
    options = {"clients": 9, "clients_per_round": 6, "secure_aggregation": 2, "grants": "client_selection"}
    assert list(changed(small, **options, audit_clients="1").always_asked()) == [0, 1, 2, 3]


def test_more_attacked_clients_than_a_round_has_are_refused(small) -> None:
    config = changed(small, clients=6, clients_per_round=2, grants="client_selection", audit_clients="0,1,4")
    with pytest.raises(UsageError, match="the 3 attacked clients in every round, which has 2"):
        config.validate()


def test_a_clients_batches_cover_its_data(small) -> None:
    task = ClientTask(small, "none")
    own = len(task.parts[1])
    ids = [task.batch(1, number, 0).ids[0] for number in range(1, own + 1)]
    assert len(set(ids)) == own


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            lambda result: (_ for _ in ()).throw(RuntimeError("disk on fire")),
            "round 1: client 1 failed: RuntimeError: disk on fire",
        ),
        (
            lambda result: result.tensors["pos_embed"].fill_(float("nan")),
            "round 1: client 1 sent parameters with NaN or infinity",
        ),
    ],
)
def test_a_failing_client_stops_the_round_and_is_named(small, monkeypatch, fault, words: str) -> None:
    honest = ClientTask.update

    def update(self, client, number, *state):
        result = honest(self, client, number, *state)
        if client == 1:
            fault(result)
        return result

    monkeypatch.setattr(ClientTask, "update", update)
    with pytest.raises(ClientFailure, match=words):
        train(small)


WEIGHTS = {"update": "weights"}
ON_RAY = {  # defence, and options of the federation
    "mjp": ("mjp", {}),
    "crop+flip, dropout, drop path": ("none", {"augment": "crop+flip", "dropout": 0.1, "drop_path": 0.1}),
    "two epochs": ("none", WEIGHTS | {"local_epochs": 2, "batch_size": 2, "augment": "deit"}),
    "AdamW": ("none", WEIGHTS | {"optimizer": "adamw", "weight_decay": 0.05, "learning_rate": 1e-3}),
    "momentum, FedAvgM": ("none", WEIGHTS | {"momentum": 0.9, "strategy": "fedavgm"}),
    "FedProx": ("none", WEIGHTS | {"local_steps": 2, "strategy": "fedprox:proximal_mu=0.5"}),
    "FedAdam": ("dp_sgd", {"strategy": "fedadam"}),
}


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
@pytest.mark.parametrize("name", ON_RAY)
def test_ray_gives_identical_updates_and_models(small, name: str) -> None:
    defense, options = ON_RAY[name]
    config = changed(small, **options)
    for here, there in zip(train(config, defense), train(config, defense, engine="ray"), strict=True):
        assert sorted(here) == sorted(there)
        assert all(torch.equal(here[k][n], there[k][n]) for k in here for n in here[k])


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_ray_gives_the_rows_of_the_local_engine_in_its_order(tmp_path) -> None:
    """Clients end in any order on Ray; rows follow the clients' ids within a round."""
    given = ["--model", "vit_micro_32", "--weights", "random", "--clients", "6", "--rounds", "2", "--threads", "1"]
    given += ["--audit-clients", *"012345", "--attacks", "patch_embedding", "--test-limit", "4"]
    rows = []
    for engine in ("local", "ray"):
        out = tmp_path / engine
        assert simulate.main([*given, "--engine", engine, "--out", str(out)]) == 0
        read = map(json.loads, (out / "rows.jsonl").read_text().splitlines())
        rows.append([row | {"seconds": 0.0, "run_id": ""} for row in read])
    assert [(row["round"], row["client"]) for row in rows[0][::3]] == [(r, c) for r in (1, 2) for c in range(6)]
    assert rows[1] == rows[0]


def test_ray_without_ray(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install"):
        ENGINES.get("ray")(lambda grid: None, 2, RunConfig().client_entropy())
