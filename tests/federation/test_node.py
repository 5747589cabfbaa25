"""A server that does not keep to the rules: what its orders get from a node, and what it can compute of the draws."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from PIL import Image

from attacks import ThreatModel
from fedmjp.client import ClientTask
from fedmjp.config import RunConfig, from_flat
from fedmjp.entropy import ClientEntropy
from fedmjp.federation import build_client_app, run_rounds
from fedmjp.federation.client_app import app, pack_state
from fedmjp.federation.local_grid import LocalGrid
from fedmjp.federation.node import FAILED, OrderRefused, order_on_node
from fedmjp.federation.tap import WrappedGrid
from fedmjp.federation.wire import flat, layout_of, unpack
from fedmjp.models import build_model
from fedmjp.models.weights import read_state
from tests.conftest import observed_update

OPTIONS = {"model": "vit_mini_32", "weights": "random", "clients": 2, "rounds": 1, "test_limit": 2, "threads": 1}
NOISE = "noise:clip_norm=1.0,noise_multiplier=0.01"


@pytest.fixture(scope="module")
def state():
    """What a server sends: the state of a model of the ordered shape."""
    return pack_state(ClientTask(from_flat(OPTIONS), "none"))


def reply_of(
    state,
    node_config: Mapping[str, Any],
    defense: str = "none",
    client=app,
    kept: RecordDict | None = None,
    number: int = 1,
    entries: tuple[str, ...] = (),
    **ordered,
) -> Message:
    """A node's reply to an order of round `number`; what it keeps in `kept`, such as its key, is that of an earlier
    call. The run trains under `entries`, by default under the defence alone."""
    order = dataclasses.replace(from_flat({**OPTIONS, **ordered}), defense=entries or (defense,)).order()
    record = ConfigRecord({"config": order, "defense": defense, "round": number})
    LocalGrid(app, 1)  # Flower's messages carry the id of a run, which a grid sets
    message = Message(RecordDict({"state": state, "instructions": record}), 1, MessageType.TRAIN)
    message.metadata.__dict__["_message_id"] = "1"
    return client(
        message, Context(1, 1, {"partition-id": 0, **node_config}, RecordDict() if kept is None else kept, {})
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder of the client's that nobody offered for training."""
    root = tmp_path_factory.mktemp("home")
    for name in ("holiday", "passport"):
        (root / name).mkdir()
        for index in range(3):
            Image.new("RGB", (32, 32), (40 * index, 9, 9)).save(root / name / f"{index}.png")
    return root


def test_an_order_gets_no_file_that_the_node_did_not_name(state, home, caplog) -> None:
    """Neither the pictures of an existing folder, nor whether one exists; the same for weights and checkpoints."""
    logging.disable(logging.NOTSET)
    for option, ending in (("data", "folder:{}"), ("data_path", "{}"), ("weights", "{}/w"), ("from", "{}/w")):
        words = set()
        for place in (home, home / "nowhere"):
            reply = reply_of(state, {}, **{option: ending.format(place)})
            assert reply.has_error()
            words.add(reply.error.reason)
        assert len(words) == 1, option
        assert "--node-config only" in words.pop()


def test_the_node_trains_on_its_own_data_whatever_is_ordered(state, home) -> None:
    own = {"data": f"folder:{home}"}
    ordered, named = (reply_of(state, own, data=data) for data in ("folder:/etc", "photos"))
    failures = [reply.error.reason for reply in (ordered, named) if reply.has_error()]
    assert failures == [FAILED] * 2  # two classes of its own, where the server's model has more: nothing leaks of that
    reply = reply_of(state, {"data": "photos"}, data="folder:/etc")
    assert not reply.has_error()


def test_a_path_beside_the_nodes_own_data_is_not_opened(state, home) -> None:
    """The name of the data set is the node's, the place where it is looked for the server's: as if none was ordered."""
    plain = {"data": "photos"}
    given = order_on_node(from_flat({**OPTIONS, "data_path": str(home)}).order(), "none", plain)
    assert given == order_on_node(from_flat(OPTIONS).order(), "none", plain)
    assert not reply_of(state, plain, data_path=str(home)).has_error()
    reply = reply_of(state, {"data_path": str(home)}, data=f"folder:{home}")
    assert "--node-config only" in reply.error.reason


def test_a_defence_that_the_order_leaves_out_is_not_run_without_its_options(state) -> None:
    """The options of a defence that the run does not name are not in its order, and would be those by default."""
    node = {"defense": "noise", "noise_multiplier": 0.5, "clip_norm": 0.1}
    fits = {"noise_multiplier": 0.5, "clip_norm": 0.1}
    assert not reply_of(state, node, "noise", **fits).has_error()
    order = json.loads(from_flat({**OPTIONS, **fits, "defense": "noise"}).order()) | {"defense": ["none"]}
    with pytest.raises(OrderRefused, match="its defense is none of the run's"):
        order_on_node(json.dumps(order), "noise", node)


def test_a_round_is_not_repeated(state) -> None:
    """Twice the same noise on the gradients of two models would leave their difference without any."""
    kept, run = RecordDict(), {"entries": ("none", "noise"), "rounds": 3}
    asked = partial(reply_of, state, {}, kept=kept, **run)
    assert not asked("noise", number=1).has_error()
    assert not asked("none", number=1).has_error()  # a federation of its own
    assert not asked("noise", number=3).has_error()  # not every client is in every round
    assert "round 1 of 3 after round 3" in asked("noise", number=1).error.reason
    assert "round 3 of 3 after round 3" in asked("noise", number=3).error.reason
    assert "round 4 of 3 after round 3" in asked("noise", number=4).error.reason
    longer = reply_of(state, {}, "noise", kept=kept, number=4, **{**run, "rounds": 9})
    assert "not those of the run's first order" in longer.error.reason


def test_two_defences_of_a_run_do_not_share_their_noise(state) -> None:
    """u1 - u2 would be (s1 - s2) z: with z the server could take the noise off both."""
    kept, loud = RecordDict(), [f"noise:clip_norm=1.0,noise_multiplier={m}" for m in (1.0, 2.0)]
    first, second = (
        flat(reply_of(state, {}, one, kept=kept, entries=tuple(loud)).content["update"]["parameters"]) for one in loud
    )
    assert float(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.05


@pytest.mark.parametrize("ordered", ["random", "auto", "/etc/passwd"])
def test_the_node_builds_its_own_weights_whatever_is_ordered(state, tmp_path, monkeypatch, ordered: str) -> None:
    """No other file is read, and one that does not fit tells the server nothing; what is trained is what was sent."""
    opened, kept = [], RecordDict()
    monkeypatch.setattr("fedmjp.models.weights.read_state", lambda path: opened.append(path) or read_state(path))
    fits, other = tmp_path / "fits.pt", tmp_path / "other.pt"
    torch.save(build_model("vit_mini_32", num_classes=8, weights="random", seed=1).module.state_dict(), fits)
    torch.save({"w": torch.zeros(3)}, other)
    reply = reply_of(state, {"weights": str(fits)}, kept=kept, weights=ordered)
    assert set(opened) == {fits}
    del kept["orders"]  # the key is that of before, the run another one
    plain = reply_of(state, {}, kept=kept).content["update"]["parameters"]
    assert reply.content["update"]["parameters"].data == plain.data
    assert reply_of(state, {"weights": str(other)}, weights=ordered).error.reason == FAILED


PINNED = [
    ({"defense": NOISE}, NOISE, {}, ""),
    ({"defense": "noise", "noise_multiplier": 0.01}, NOISE, {}, ""),
    ({"defense": NOISE}, "none", {}, "another defense"),
    ({"defense": NOISE}, "noise:clip_norm=1.0,noise_multiplier=0", {}, "another defense"),
    ({"defense": NOISE}, "noise", {"noise_multiplier": 0.001}, "another defense"),
    ({"batch-size": 2}, "none", {"batch_size": 1}, "another batch_size"),
    ({"update": "weights"}, "none", {"update": "gradient"}, "another update"),
    ({"gamma": 0.5}, "none", {}, FAILED),  # a defence's option without the defence: the log says so
    ({"no-such-option": 1}, "none", {}, FAILED),
    ({"client_seed": 1}, "none", {}, FAILED),
]


@pytest.mark.parametrize(("pinned", "defense", "ordered", "words"), PINNED)
def test_what_the_node_holds_fixed_is_not_overruled(state, pinned, defense, ordered, words: str) -> None:
    reply = reply_of(state, pinned, defense, **ordered)
    if not words:
        assert not reply.has_error()
        return
    assert words in reply.error.reason
    assert "\n" not in reply.error.reason


def test_a_failure_tells_the_server_nothing(state, tmp_path, monkeypatch) -> None:
    def fail(*_args):
        raise OSError(f"{tmp_path}/secret is missing")

    monkeypatch.setattr(ClientTask, "update", fail)
    reason = reply_of(state, {}).error.reason
    assert reason == FAILED


def test_noise_of_a_node_is_not_what_the_servers_order_gives(state) -> None:
    """The server that regenerates the noise from its own order, as it could when the seed travelled in it."""
    loud = "noise:clip_norm=1.0,noise_multiplier=1.0"
    config = from_flat(OPTIONS)
    task = ClientTask(config, loud)

    def agreement(reply: Message) -> float:
        """Correlation of an update with the noise that the order and the usual client seed give."""
        sent = unpack(flat(reply.content["update"]["parameters"]), layout_of(task.parameters))
        generator = task.message_generator(0, 1)
        drawn = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in sent.items()}
        return float(
            torch.corrcoef(torch.stack([torch.cat([t.flatten() for t in s.values()]) for s in (sent, drawn)]))[0, 1]
        )

    first, second = (reply_of(state, {}, loud) for _ in range(2))
    assert first.content["update"]["parameters"].data != second.content["update"]["parameters"].data
    assert abs(agreement(first)) < 0.05
    assert agreement(reply_of(state, {}, loud, build_client_app(config.client_entropy()))) > 0.9  # of a simulation


class Recording(WrappedGrid):
    """Keeps all messages that pass."""

    def __init__(self, grid) -> None:
        super().__init__(grid)
        self.passed: list[Message] = []

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        for reply in self._grid.send_and_receive(messages, timeout=timeout):
            self.passed += [reply]
            yield reply
        self.passed += messages


def parts_of(value: Any, seen: set[int]) -> Iterator[Any]:
    """A value and all that it holds, at any depth."""
    if id(value) in seen:
        return
    seen.add(id(value))
    yield value
    if isinstance(value, Mapping):
        children = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        children = list(value)
    else:
        children = list(vars(value).values()) if hasattr(value, "__dict__") else []
    for child in children:
        yield from parts_of(child, seen)


def test_no_message_and_no_observation_holds_what_clients_draw_from() -> None:
    config = dataclasses.replace(from_flat({**OPTIONS, "client_seed": 918273645}), defense=(NOISE,))
    entropy = config.client_entropy()
    task = ClientTask(config, NOISE)
    grid, views = Recording(LocalGrid(build_client_app(entropy), 2)), []
    run_rounds(grid, task, NOISE, on_update=views.append, on_round=lambda number, state: None)
    observation = observed_update(task, views[0].sent, views[0].received, 1)
    assert grid.passed
    seeds = {918273645, *(entropy.seed(purpose, 0, 1, 0) for purpose in range(9))}
    for part in parts_of([grid.passed, observation, ThreatModel(), views], set()):
        assert not isinstance(part, (ClientEntropy, ClientTask, RunConfig, torch.Generator))
        assert not (isinstance(part, int) and part in seeds)
        if isinstance(part, (str, bytes)):
            assert (str(918273645) if isinstance(part, str) else entropy.key) not in part
    instructions = next(m.content["instructions"] for m in grid.passed if "instructions" in m.content)
    assert "client_seed" not in json.loads(instructions["config"])


def test_generators_start_from_all_of_the_key() -> None:
    """torch alone reads 32 bits of a seed: two that differ above those are one generator, which a server can try."""
    short = [torch.randn(4, generator=torch.Generator().manual_seed(5 + k * 2**32)) for k in (0, 1)]
    assert torch.equal(*short)
    state = ClientEntropy(b"k" * 32).generator(3, 0, 1, 0).get_state()
    words = state[24 : 24 + 8 * 624].view(torch.int64)
    seeded = torch.Generator().manual_seed(5).get_state()[24 : 24 + 8 * 624].view(torch.int64)
    assert int(words.max()) < 2**32
    assert len(words.unique()) > 600
    recurrence = (1812433253 * (seeded[:-1] ^ (seeded[:-1] >> 30)) + torch.arange(1, 624)) % 2**32
    assert torch.equal(seeded[1:], recurrence)  # one word gives all others
    recurrence = (1812433253 * (words[:-1] ^ (words[:-1] >> 30)) + torch.arange(1, 624)) % 2**32
    assert (words[1:] == recurrence).sum() < 3
    numbers = torch.randn(20000, generator=ClientEntropy(b"k" * 32).generator(3, 0, 1, 0))
    assert abs(float(numbers.mean())) < 0.03
    assert float(numbers.std()) == pytest.approx(1, abs=0.03)


def test_a_simulation_repeats_itself_and_another_client_seed_does_not() -> None:
    config = from_flat(OPTIONS)
    first, again, other = (ClientTask(dataclasses.replace(config, client_seed=seed), "mjp") for seed in (0, 0, 1))
    assert first.batch_ids(0, 1, 0) == again.batch_ids(0, 1, 0)
    orders = [[task.batch_ids(0, number, 0) for number in range(1, 7)] for task in (first, again, other)]
    assert orders[0] == orders[1] != orders[2]
    masks = [task.seen(task.batch(0, 1, 0), 0, 1, 0).position_mask for task in (first, again, other)]
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
