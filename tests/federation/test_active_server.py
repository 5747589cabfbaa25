"""An active server in a federation: what the attacked clients are sent, what the others train, and what comes back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch.nn import functional

from attacks import ATTACKS, ThreatModel, UsageError
from attacks.active.architecture import add_sent_layers
from attacks.active.base import ActiveAttack, Sending
from fedmjp import simulate
from fedmjp.audit import Watcher
from fedmjp.audited_federation import FederationAudit
from fedmjp.client import ClientTask
from fedmjp.config import RunConfig, from_flat
from fedmjp.federation import ENGINES, ActiveServer, ServerView, TapGrid, run_rounds
from fedmjp.federation.local_grid import LocalGrid
from fedmjp.metrics.pixel import psnr
from fedmjp.records.rows import load_rows
from tests.attacks.models import timm_vit
from tests.conftest import photographs
from tests.federation.conftest import changed

GRANTS = ["active_parameters", "model_weights", "position_gradient", "several_rounds"]


def train(config: RunConfig, prepared: set[int]) -> tuple[dict[int, ServerView], dict[int, dict[str, torch.Tensor]]]:
    """Views of the last round by client and states by round, where clients in `prepared` get a classifier of zeros."""
    views, states, task = {}, {}, ClientTask(config, "none")

    def on_send(number: int, client: int, state: dict[str, torch.Tensor]) -> Sending | None:
        return Sending({"head.weight": torch.zeros_like(state["head.weight"])}) if client in prepared else None

    def run(grid) -> None:
        run_rounds(
            grid,
            task,
            "none",
            on_update=lambda view: views.__setitem__(view.client, view),
            on_round=lambda number, state: states.__setitem__(number, {n: t.clone() for n, t in state.weights.items()}),
            on_send=on_send,
        )

    ENGINES.get("local")(run, config.federation.clients, config.client_entropy())
    return views, states


@pytest.mark.parametrize("update", ["gradient", "weights"])
def test_updates_of_prepared_models_do_not_enter_the_mean(small, update: str) -> None:
    config = changed(small, rounds=1, update=update)
    views, states = train(config, {1})
    assert not views[1].sent["head.weight"].any()
    assert torch.equal(views[1].sent["pos_embed"], states[0]["pos_embed"])
    assert torch.equal(views[0].sent["head.weight"], states[0]["head.weight"])
    others = [views[client].received["head.weight"].double() for client in (0, 2)]
    mean = sum(others) / 2
    expected = mean if update == "weights" else states[0]["head.weight"] - config.federation.learning_rate * mean
    torch.testing.assert_close(states[1]["head.weight"].double(), expected.double(), rtol=1e-5, atol=1e-7)


def test_with_every_client_attacked_the_global_model_stays(small) -> None:
    _, states = train(changed(small, rounds=1), {0, 1, 2})
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


def attack(out, *attacks_and_options: str) -> int:
    """Exit code of a run of three clients with four photographs each, of which client 0 is attacked."""
    small = [
        "--model",
        "vit_mini_32",
        "--weights",
        "auto",
        "--clients",
        "3",
        "--train-limit",
        "12",
        "--batch-size",
        "4",
    ]
    small += ["--audit-clients", "0", "--test-limit", "8", "--threads", "1", "--out", str(out), "--attacks"]
    try:
        return simulate.main([*small, *attacks_and_options])
    except SystemExit as stop:
        return int(stop.code)


def rows_of(out, name: str) -> list[dict]:
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    return [row for row in rows if row["attack"] == name]


@pytest.mark.parametrize("name", ["fishing", "feature_fishing"])
def test_clients_that_withhold_what_is_read_are_a_diagnosis(tmp_path, name: str) -> None:
    """The server goes on, though no earlier update tells what to send next."""
    quick = ["--model", "vit_micro_32", "--weights", "random", "--rounds", "2", "--grants", *GRANTS]
    assert attack(tmp_path / "run", name, *quick, "--defense", "withheld:train_only=*.bias") == 0
    rows = rows_of(tmp_path / "run", name)
    assert len(rows) == 8
    assert {row["diagnosis"].partition(" (")[0] for row in rows} == {"the update holds no gradient of head.weight"}


SEARCH = ["feature_fishing", "--rounds", "5", "--grants", *GRANTS]


@pytest.fixture(scope="module")
def searched(tmp_path_factory) -> list[dict]:
    """Rows of a search that was not interrupted."""
    out = tmp_path_factory.mktemp("active") / "run"
    assert attack(out, *SEARCH) == 0
    return rows_of(out, "feature_fishing")


def test_every_image_of_a_client_comes_back_while_the_others_train(searched) -> None:
    assert {row["image_id"] for row in searched if (row["psnr"] or 0) > 60} == {row["image_id"] for row in searched}
    assert len({row["image_id"] for row in searched}) == 4
    assert all(row["threat_model"] == GRANTS for row in searched)


def test_a_server_that_selects_its_clients_searches_while_others_come_and_go(tmp_path) -> None:
    """A round has two clients of six: the attacked one is asked in all five, and all of its images come back."""
    options = ["--clients", "6", "--clients-per-round", "2", "--train-limit", "24"]
    assert attack(tmp_path / "run", *SEARCH, "client_selection", *options) == 0
    rows = rows_of(tmp_path / "run", "feature_fishing")
    assert {row["round"] for row in rows} == {1, 2, 3, 4, 5}
    assert all("client_selection" in row["threat_model"] for row in rows)
    assert len({row["image_id"] for row in rows if (row["psnr"] or 0) > 60}) == 4


@pytest.mark.long
def test_an_interrupted_search_goes_on(searched, tmp_path, monkeypatch) -> None:
    finish = FederationAudit.on_round

    def stop(self, number, state) -> None:
        finish(self, number, state)
        if number == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(FederationAudit, "on_round", stop)
    assert attack(tmp_path / "run", *SEARCH) == 130
    monkeypatch.setattr(FederationAudit, "on_round", finish)
    assert attack(tmp_path / "run", *SEARCH, "--resume") == 0
    again = rows_of(tmp_path / "run", "feature_fishing")
    assert [row["psnr"] for row in again] == [row["psnr"] for row in searched]


def test_secure_aggregation_makes_one_batch_of_a_group(tmp_path) -> None:
    """Two groups of two clients, of which the first is sent prepared models: one image of four photographs."""
    small = ["--clients", "4", "--batch-size", "2", "--train-limit", "8", "--rounds", "2", "--secure-aggregation", "2"]
    grants = [grant for grant in GRANTS if grant != "several_rounds"]
    assert attack(tmp_path / "run", "fishing", *small, "--grants", *GRANTS) == 0
    rows = rows_of(tmp_path / "run", "fishing")
    assert {row["batch_size"] for row in rows} == {4}
    assert all(set(grants) <= set(row["threat_model"]) and "aggregate_only" in row["threat_model"] for row in rows)
    assert any((row["psnr"] or 0) > 60 for row in rows)


def test_one_client_is_singled_out_of_a_sum_of_weights_after_two_steps_of_adamw(tmp_path) -> None:
    """Two groups of two clients with two photographs each, which both of their local steps use; one is of class 2."""
    small = ["--clients", "4", "--batch-size", "2", "--train-limit", "8", "--rounds", "1", "--secure-aggregation", "2"]
    local = ["--update", "weights", "--local-steps", "2", "--optimizer", "adamw", "--learning-rate", "0.001"]
    settings = ["fishing.single_out=true", "fishing.local_steps=adamw", "fishing.target=2"]
    options = ["--seed", "2", "--attack-options", *settings, "--grants", *GRANTS]
    assert attack(tmp_path / "run", "fishing", *small, *local, *options) == 0
    rows = rows_of(tmp_path / "run", "fishing")
    assert len({row["image_id"] for row in rows}) == 2  # of the client that is singled out, and of no other
    (found,) = [row for row in rows if row["psnr"]]
    assert found["psnr"] > 60
    assert found["diagnosis"] == ""
    assert all(row["setting"].endswith("sum of 2 clients, one singled out") for row in rows)
    assert all("aggregate_only" in row["threat_model"] for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["fishing", "--attack-options", "fishing.single_out=true", "--grants", *GRANTS],
            "takes a client out of a sum: pass --secure-aggregation",
        ),
        (["fishing"], "attack 'fishing' needs active_parameters, which the threat model does not grant"),
        (["imprint"], "attack 'imprint' needs active_architecture, which the threat model does not grant"),
        (["fishing", "feature_fishing", "--grants", *GRANTS], "takes one attack that chooses what clients are sent"),
        (["fishing", "--attack-options", "fishing.target=99", "--grants", *GRANTS], "fishing.target must lie in 0.."),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, options: list[str], message: str) -> None:
    assert attack(tmp_path / "run", *options) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error


def test_options_are_read_from_a_flower_run() -> None:
    config = from_flat({"attacks": "fishing", "grants": ",".join(GRANTS)})
    config.validate()
    assert config.audit.named() == ("fishing",)


def batch_app(size: int, rate: float = 0.5) -> ClientApp:
    """Clients of another app: a step of SGD on a batch of photographs of labels 0, 1, 2..., and weights back.

    They build the model that they are sent, added layers included.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = timm_vit()
        add_sent_layers(model, message.content["arrays"].to_torch_state_dict())
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimiser = torch.optim.SGD(model.parameters(), lr=rate)
        images, labels = photographs(32, size), torch.arange(size)
        functional.cross_entropy(model((images - 0.5) / 0.5), labels).backward()
        optimiser.step()
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": size})}
        return Message(RecordDict(content), reply_to=message)

    return app


def watcher_of(model: torch.nn.Module, out: Path, *attacks: str | ActiveAttack) -> Watcher:
    """Of the clients of `batch_app`."""
    options = {"learning_rate": 0.5, "batch_size": 4, "local_steps": 1, "optimiser": "sgd", "weight_decay": 0.0}
    return Watcher(
        model,
        image_shape=(3, 32, 32),
        mean=[0.5] * 3,
        std=[0.5] * 3,
        attacks=attacks,
        threat_model=ThreatModel.parse(GRANTS),
        out=out,
        **options,
    )


def test_an_active_server_in_a_flower_app_of_ones_own(tmp_path) -> None:
    torch.manual_seed(0)
    model = timm_vit().eval()
    watcher = watcher_of(model, tmp_path / "leaks", "fishing")
    grid = TapGrid(LocalGrid(batch_app(4), 2), ActiveServer(watcher))
    strategy = FedAvg(fraction_evaluate=0.0)
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=2)
    attacked = [found for node, _, found in watcher.found if found.images is not None]
    assert watcher.problems == []
    assert watcher.verdict().recovered == 2
    assert len(attacked) == 2
    for round, found in enumerate(attacked):
        assert found.diagnosis == ""
        assert float(psnr(found.images, photographs(32, 4)[round : round + 1])[0]) > 40
    honest = [found for _, _, found in watcher.found if found.images is None]
    assert all("not prepared" in found.diagnosis for found in honest)
    assert (result.arrays.to_torch_state_dict()["head.weight"] != 0).any(dim=1).all()


def test_a_search_by_feature_in_a_flower_app_of_ones_own(tmp_path) -> None:
    """The attacked node is sent the weights of its first round in every one, while the other node trains."""
    torch.manual_seed(0)
    model = timm_vit().eval()
    watcher = watcher_of(model, tmp_path / "leaks", "feature_fishing")
    grid = TapGrid(LocalGrid(batch_app(4), 2), ActiveServer(watcher))
    result = FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord(model.state_dict()), num_rounds=5)
    assert watcher.problems == []
    found = [one.images for _, _, one in watcher.found if one.images is not None and not one.diagnosis]
    closest = [psnr(image.expand(4, -1, -1, -1), photographs(32, 4)) for image in torch.cat(found)]
    assert [float(one.max()) > 60 for one in closest] == [True] * 4
    assert {int(one.argmax()) for one in closest} == {0, 1, 2, 3}
    assert not torch.equal(result.arrays.to_torch_state_dict()["head.weight"], model.state_dict()["head.weight"])


def test_an_added_layer_reaches_clients_that_build_what_they_are_sent(tmp_path) -> None:
    torch.manual_seed(0)
    model = timm_vit().eval()
    watcher = Watcher(
        model,
        image_shape=(3, 32, 32),
        mean=[0.5] * 3,
        std=[0.5] * 3,
        attacks=["imprint"],
        threat_model=ThreatModel.parse(["model_weights", "active_architecture"]),
        learning_rate=0.5,
        batch_size=4,
        out=tmp_path / "leaks",
    )
    grid = TapGrid(LocalGrid(batch_app(4), 2), ActiveServer(watcher))
    result = FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord(model.state_dict()), num_rounds=1)
    (found,) = [found for _, _, found in watcher.found if found.images is not None]
    whole = found.images[found.known.flatten(1).all(dim=1)]
    assert len(whole) >= 2
    for image in whole:
        assert max(float(psnr(image[None], one[None])[0]) for one in photographs(32, 4)) > 40
    assert result.arrays.to_torch_state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    ("name", "defense", "granted"),
    [
        ("imprint", "none", ["active_architecture", "model_weights"]),
        ("adapter_trap", "adapters", ["active_parameters", "model_weights", "several_rounds"]),
    ],
)
def test_other_models_reach_the_attacked_client_alone(tmp_path, name: str, defense: str, granted: list[str]) -> None:
    one = ["--batch-size", "1"] if defense == "adapters" else []
    options = ["--rounds", "1", "--defense", defense, *one, "--grants", *granted]
    assert attack(tmp_path / "run", name, *options) == 0
    rows = rows_of(tmp_path / "run", name)
    assert max(row["psnr"] or 0 for row in rows) > 60
    assert all(row["threat_model"] == granted for row in rows)


def test_a_node_is_singled_out_of_a_sum_in_a_flower_app(tmp_path) -> None:
    torch.manual_seed(0)
    model = timm_vit().eval()
    watcher = watcher_of(model, tmp_path / "leaks", ATTACKS.get("fishing")(single_out=True))
    grid = TapGrid(LocalGrid(batch_app(4), 3), ActiveServer(watcher, sum_of=3))
    result = FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord(model.state_dict()), num_rounds=1)
    assert watcher.problems == []
    ((_, _, found),) = watcher.found  # one answer of three replies
    assert found.diagnosis == ""
    assert found.details["senders"] == 1  # of the three nodes' images of the class
    rows = load_rows(tmp_path / "leaks" / "rows.jsonl")
    assert rows["threat_model"].map(lambda grants: "aggregate_only" in grants).all()
    assert rows["setting"].str.endswith("sum of 3 clients, one singled out").all()
    assert float(psnr(found.images, photographs(32, 4)[:1])[0]) > 40
    torch.testing.assert_close(result.arrays.to_torch_state_dict()["head.weight"], model.state_dict()["head.weight"])


def test_a_sum_of_one_singles_nobody_out(tmp_path) -> None:
    watcher = watcher_of(timm_vit(), tmp_path, ATTACKS.get("fishing")(single_out=True))
    with pytest.raises(UsageError, match="pass sum_of=NUMBER of at least 2"):
        ActiveServer(watcher)


def test_a_watcher_without_an_active_attack_is_refused(tmp_path) -> None:
    watcher = Watcher(timm_vit(), image_shape=(3, 32, 32), mean=[0.5] * 3, std=[0.5] * 3, out=tmp_path)
    with pytest.raises(UsageError, match="needs one attack that chooses what is sent; the watcher has 0"):
        ActiveServer(watcher)
