"""Clients that check what they are sent: our own federation, and the mod in a Flower app of someone else."""

from __future__ import annotations

import logging

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from attacks import ATTACKS
from fedmjp import simulate
from fedmjp.federation import ReceivedCheck, build_client_app, of_model
from fedmjp.federation.boundary import DECLINED
from fedmjp.federation.local_grid import LocalGrid
from fedmjp.records.failures import LEFT_OUT, load_failures
from tests.attacks.active.contexts import before
from tests.attacks.models import timm_vit
from tests.conftest import photographs
from tests.federation.conftest import stop_in_round

GRANTS = ["active_parameters", "model_weights", "position_gradient", "several_rounds"]


def run(out, *options: str) -> int:
    """Exit code of two rounds of two clients with four photographs each, of which client 0 is fished for."""
    small = ["--model", "vit_micro_32", "--clients", "2", "--train-limit", "8", "--batch-size", "4", "--rounds", "2"]
    small += [
        "--audit-clients",
        "0",
        "--test-limit",
        "4",
        "--threads",
        "1",
        "--attacks",
        "fishing",
        "--grants",
        *GRANTS,
    ]
    return simulate.main([*small, "--out", str(out), *options])


def test_a_fished_client_refuses_and_the_federation_goes_on(tmp_path, undrawn) -> None:
    out = tmp_path / "run"
    assert run(out, "--refuse-suspicious", "--least-share", "0.5") == 0
    failures = load_failures(out)
    assert [(failure["round"], failure["client"]) for failure in failures] == [(1, 0), (2, 0)]
    assert {failure["status"] for failure in failures} == {LEFT_OUT}
    assert failures[0]["reason"].startswith("refused the model that it was sent: ")
    assert "bias_range 1e+03" in failures[0]["reason"]
    assert not (out / "rows.jsonl").read_text()
    assert "client 0 refused the model that it was sent" in (out / "report.html").read_text()
    assert len((out / "rounds.csv").read_text().splitlines()) == 4  # the head, and rounds 0 to 2


@pytest.mark.parametrize(
    "trained",
    [[], ["--update", "weights", "--local-steps", "2", "--optimizer", "adamw", "--learning-rate", "0.0005"]],
)
def test_an_honest_federation_refuses_nothing(tmp_path, undrawn, trained: list[str]) -> None:
    """Every client checks every round's model; without --least-share one refusal would stop the run."""
    honest = ["--rounds", "3", "--attacks", "patch_embedding", "--grants", "model_weights", "position_gradient"]
    assert run(tmp_path / "run", "--refuse-suspicious", *honest, *trained) == 0
    assert load_failures(tmp_path / "run") == []
    assert len((tmp_path / "run" / "rounds.csv").read_text().splitlines()) == 5  # the head, and rounds 0 to 3


def test_too_few_updates_stop_the_run(tmp_path, capsys) -> None:
    assert run(tmp_path / "run", "--refuse-suspicious") == 1
    assert "error: round 1: client 0 refused the model that it was sent: row_spread 1" in capsys.readouterr().err
    assert run(tmp_path / "run", "--refuse-suspicious", "--resume") == 1
    assert [(failure["round"], failure["client"]) for failure in load_failures(tmp_path / "run")] == [(1, 0)]


def test_after_an_interruption_a_model_is_compared_with_the_one_before(tmp_path, undrawn, monkeypatch) -> None:
    """A server that begins to fish in the third round, which is interrupted and run again."""
    options = ("--refuse-suspicious", "--least-share", "0.5", "--rounds", "3", "--audit-rounds", "3")
    honest = ("--learning-rate", "0.001")
    assert run(tmp_path / "whole", *options, *honest) == 0
    with monkeypatch.context() as patch:
        stop_in_round(3, patch)
        assert run(tmp_path / "run", *options, *honest) == 130
    assert run(tmp_path / "run", *options, *honest, "--resume") == 0
    (whole,), (resumed,) = (load_failures(tmp_path / name) for name in ("whole", "run"))
    assert "row_norms" in whole["reason"]  # which takes the round before
    assert resumed["reason"] == whole["reason"]


def checked_app(model: nn.Module, refuse: bool, labels: Tensor | None) -> ClientApp:
    """Clients that reply with how many messages they trained on, behind the mod."""

    def first_batch(content: RecordDict, context: Context) -> tuple[Tensor, Tensor | None]:
        return (photographs(32, 4) - 0.5) / 0.5, labels

    app = ClientApp(mods=[ReceivedCheck(of_model(model, first_batch), refuse=refuse)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"trained": 1})}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict(), reply_to=message)

    return app


def send(grid: LocalGrid, state: dict[str, Tensor], kind: str = MessageType.TRAIN) -> Message:
    content = RecordDict({"arrays": ArrayRecord(state)})
    return next(iter(grid.send_and_receive([Message(content, 1, kind)])))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return timm_vit().eval()


@pytest.fixture(scope="module")
def fished(model) -> dict[str, Tensor]:
    return model.state_dict() | ATTACKS.get("fishing")(target=2).send(before(model, (3, 32, 32))).parameters


def test_the_mod_refuses_in_an_app_of_someone_else(model, fished) -> None:
    grid = LocalGrid(checked_app(model, True, torch.arange(4)), 1)
    assert send(grid, model.state_dict()).content["metrics"]["trained"] == 1
    refused = send(grid, fished)
    assert refused.has_error()
    assert refused.error.code == DECLINED
    for name in ("row_norms 1", "dead_rows", "bias_range 1e+03", "concentration 1", "silent_images 0.75"):
        assert name in refused.error.reason
    # The model that was refused is not what the next one is compared with.
    assert send(grid, model.state_dict()).has_content()
    assert send(grid, fished, MessageType.EVALUATE).has_content()


def test_messages_that_hold_some_parameters_alone_are_compared(model, fished) -> None:
    """What a server never sends is no layer that the last model lacked."""
    grid = LocalGrid(checked_app(model, True, torch.arange(4)), 1)
    head, fished_head = ({n: t for n, t in state.items() if "head" in n} for state in (model.state_dict(), fished))
    for _ in range(2):
        assert send(grid, head).has_content()
    assert "row_norms 1" in send(grid, fished_head).error.reason


def test_the_mod_warns(model, fished, caplog) -> None:
    grid = LocalGrid(checked_app(model, False, None), 1)
    with caplog.at_level(logging.WARNING):
        assert send(grid, model.state_dict()).has_content()
        assert not caplog.records
        assert send(grid, fished).content["metrics"]["trained"] == 1
    assert len(caplog.records) == 1
    assert "node 1 was sent a suspicious model: row_norms 1" in caplog.text
    assert "concentration" not in caplog.text  # no labels, no gradients of single images


def test_the_mod_points_out_a_first_classifier_of_zeros_and_lets_it_pass(model, caplog) -> None:
    grid = LocalGrid(checked_app(model, True, torch.arange(4)), 1)
    zero = {name: torch.zeros_like(value) for name, value in model.state_dict().items() if name.startswith("head.")}
    with caplog.at_level(logging.WARNING):
        assert send(grid, model.state_dict() | zero).content["metrics"]["trained"] == 1
    assert "node 1: the classifier head is zero in the first model" in caplog.text
    assert send(grid, model.state_dict() | zero).error.code == DECLINED  # as if nobody had trained


def test_a_model_of_other_layers_is_an_error(model) -> None:
    grid = LocalGrid(checked_app(model, False, None), 1)
    reply = send(grid, model.state_dict() | {"imprint.weight": torch.zeros(4, 4)})
    assert reply.error.reason.startswith("UsageError: the message holds imprint.weight (4, 4), which the client's")


def test_a_node_that_was_started_so_checks_whatever_the_server_asks(tmp_path, monkeypatch) -> None:
    started = LocalGrid.__init__

    def start(self, *arguments) -> None:
        started(self, *arguments)
        self._contexts[1].node_config["refuse-suspicious"] = True

    monkeypatch.setattr(LocalGrid, "__init__", start)
    monkeypatch.setattr("fedmjp.federation.engines.build_client_app", lambda entropy, states: build_client_app())
    assert run(tmp_path / "run") == 1
    assert len(load_failures(tmp_path / "run")) == 1


def test_an_added_layer_is_refused_whatever_it_holds(tmp_path) -> None:
    options = ["--attacks", "imprint", "--grants", "model_weights", "active_architecture"]
    assert run(tmp_path / "run", "--refuse-suspicious", "--least-share", "0.5", *options) == 0
    failures = load_failures(tmp_path / "run")
    assert failures
    assert all("changes the model's architecture (imprint=256)" in str(failure) for failure in failures)
