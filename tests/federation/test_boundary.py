"""Replies that no honest client sends: the server names the client, and computes nothing with them."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict

from attacks import UsageError
from fedmjp.client import ClientTask
from fedmjp.config import RunConfig
from fedmjp.federation import ClientFailure, run_rounds
from fedmjp.federation.boundary import CheckedGrid, partitions_by_node
from fedmjp.federation.client_app import build_client_app
from fedmjp.federation.local_grid import LocalGrid
from fedmjp.federation_options import FederationConfig
from fedmjp.records.provenance import source
from tests.federation.malformed import MALFORMED, copy_of, with_values
from tests.federation.test_rounds import changed

APP = build_client_app(RunConfig().client_entropy())


def test_a_good_reply_passes(good) -> None:
    expected, content = good
    assert expected.why_not(content, 1) == ""


@pytest.mark.parametrize("name", list(MALFORMED))
def test_malformed_replies_are_refused_in_one_line(good, name: str) -> None:
    expected, content = good
    bad = copy_of(content)
    MALFORMED[name](bad, np.random.default_rng(0))
    reason = expected.why_not(bad, 1)
    assert reason.startswith(("sent ", "says ", "reports "))
    assert "\n" not in reason
    assert len(reason) < 400


class Watching(LocalGrid):
    """A grid that notes whether a client's update is still held when the next client is asked."""

    def __init__(self, clients: int) -> None:
        super().__init__(APP, clients)
        self.held: list[bool] = []

    def send_and_receive(self, messages, *, timeout=None):
        last = None
        for message in messages:
            if last is not None:
                self.held.append(last() is not None)
            reply = [self._deliver(message)]
            last = weakref.ref(reply[0])
            yield reply.pop()


def test_no_reply_is_held_while_the_next_client_trains(small) -> None:
    grid = Watching(small.federation.clients)
    mean_of(changed(small, rounds=1), grid)
    assert grid.held[-(small.federation.clients - 1) :] == [False] * (small.federation.clients - 1)


class Tampering(LocalGrid):
    """A grid whose node 2, which holds partition 1, sends something else than its client."""

    def __init__(self, clients: int, change) -> None:
        super().__init__(APP, clients)
        self.change = change

    def send_and_receive(self, messages, *, timeout=None):
        for message in messages:
            reply = self._deliver(message)
            if reply.metadata.src_node_id != 2 or not reply.has_content() or "update" not in reply.content:
                yield reply
                continue
            yield from self.change(reply, message)


def tampered(name: str):
    def change(reply, message):
        content = copy_of(reply.content)
        MALFORMED[name](content, np.random.default_rng(0))
        yield Message(content, reply_to=message)

    return change


def mean_of(config: RunConfig, grid: LocalGrid) -> tuple[dict, list]:
    """The model after the rounds, and the failures."""
    states, failures = {}, []
    run_rounds(
        grid,
        ClientTask(config, "none"),
        "none",
        on_update=lambda view: None,
        on_round=lambda number, state: states.update({number: {n: t.clone() for n, t in state.weights.items()}}),
        on_failure=lambda *failure: failures.append(failure),
    )
    return states[max(states)], failures


WHOLE = ["one NaN", "no update", "10^18 examples", "a header of 10^13 values"]


@pytest.mark.parametrize("name", WHOLE)
def test_a_federation_names_the_client_and_stops(small, name: str) -> None:
    with pytest.raises(ClientFailure, match="round 1: client 1 (sent|says)"):
        mean_of(changed(small, rounds=1), Tampering(small.federation.clients, tampered(name)))


def silent(reply, message):
    return iter(())


def failed(reply, message):
    yield Message(Error(2, ""), reply_to=message)


@pytest.mark.parametrize("change", [tampered("one NaN"), silent, failed])
def test_a_federation_goes_on_without_the_client(small, change) -> None:
    """With a least share below 1 the mean is that of the others, exactly, and the failure is reported."""
    config = changed(small, rounds=1, least_share=0.5)
    after, failures = mean_of(config, Tampering(small.federation.clients, change))
    assert [(number, client) for number, client, _ in failures] == [(1, 1)]
    task = ClientTask(config, "none")
    before = {n: p.detach().clone() for n, p in (task.parameters | task.buffers).items()}
    others = [c for c in range(small.federation.clients) if c != 1]
    updates = [{n: t.clone() for n, t in task.update(c, 1, before).tensors.items()} for c in others]
    rate = config.federation.learning_rate
    for name in updates[0]:
        mean = torch.stack([update[name] for update in updates]).mean(dim=0)
        torch.testing.assert_close(after[name], before[name] - rate * mean)


def test_too_few_clients_stop_the_run(small) -> None:
    config = changed(small, rounds=1, least_share=0.9)
    with pytest.raises(ClientFailure, match="round 1: client 1 sent no reply"):
        mean_of(config, Tampering(small.federation.clients, silent))


def test_replies_twice_and_of_strangers_are_dropped(small) -> None:
    def twice(reply, message):
        yield reply
        yield reply
        stranger = Message(copy_of(reply.content), reply_to=message)
        stranger.metadata.__dict__["_src_node_id"] = 99
        yield stranger

    config = changed(small, rounds=1)
    honest, _ = mean_of(config, LocalGrid(APP, small.federation.clients))
    after, failures = mean_of(config, Tampering(small.federation.clients, twice))
    assert not failures
    assert all(torch.equal(after[n], honest[n]) for n in honest)


def test_a_mean_that_overflows_stops_the_run(small) -> None:
    """Every update is finite, and their sum is not."""

    class Loud(LocalGrid):
        def send_and_receive(self, messages, *, timeout=None):
            for message in messages:
                reply = self._deliver(message)
                if reply.has_content() and "update" in reply.content:
                    with_values(lambda v: np.full_like(v, 3e38))(reply.content, None)
                yield reply

    with pytest.raises(ClientFailure, match="the mean of .* finite updates is not finite"):
        mean_of(changed(small, rounds=1), Loud(APP, small.federation.clients))


class Nodes:
    """A grid of nodes that answer with these contents."""

    def __init__(self, *answers: dict | None, code: str | None = None) -> None:
        self.answers, self.code = answers, ConfigRecord({"source": code or source()})

    def get_node_ids(self):
        return list(range(1, len(self.answers) + 1))

    def send_and_receive(self, messages, *, timeout=None):
        for node, answer in enumerate(self.answers, start=1):
            content = RecordDict({} if answer is None else {"node": MetricRecord(answer), "code": self.code})
            yield SimpleNamespace(content=content, has_error=lambda: False, metadata=SimpleNamespace(src_node_id=node))


NODES = [
    (({"partition-id": 0}, {"partition-id": 0}), "nodes 1 and 2 both hold partition 0"),
    (({"partition-id": 0}, {"partition-id": 2}), r"node 2 sent the partition id 2; pass partition-id=0\.\.1"),
    (({"partition-id": 0}, {"partition-id": -1}), "node 2 sent the partition id -1"),
    (({"partition-id": 0}, {"partition-id": 1.0}), "node 2 sent the partition id 1.0"),
    (({"partition-id": 0}, {}), "node 2 sent the partition id nothing"),
    (({"partition-id": 0}, None), "node 2 sent the partition id nothing"),
    (({"partition-id": 1},), "no node holds partition 0 of 2"),
]


@pytest.mark.parametrize(("answers", "words"), NODES)
def test_partitions_that_cannot_be(answers, words: str) -> None:
    with pytest.raises(ClientFailure, match=words):
        partitions_by_node(Nodes(*answers), 2)


def test_a_node_with_other_code_is_refused() -> None:
    words = r"node 1 \(partition 0\) runs other code than the server \('source-0', not 'source-[0-9a-f]{10}'\): install"
    with pytest.raises(ClientFailure, match=words):
        partitions_by_node(Nodes({"partition-id": 0}, code="source-0"), 1)


def test_partitions_in_order() -> None:
    assert partitions_by_node(Nodes({"partition-id": 1}, {"partition-id": 0}), 2) == {2: 0, 1: 1}


def test_what_is_not_training_passes_unchecked(good) -> None:
    reply = SimpleNamespace(metadata=SimpleNamespace(src_node_id=4), has_content=lambda: True, content=RecordDict())
    grid = SimpleNamespace(send_and_receive=lambda messages, timeout: iter([reply]))
    query = SimpleNamespace(metadata=SimpleNamespace(dst_node_id=4, message_type="query"))
    assert list(CheckedGrid(grid, good[0]).send_and_receive([query])) == [reply]


@pytest.mark.parametrize("share", [0.0, 1.5, float("nan")])
def test_shares_out_of_range(share: float) -> None:
    with pytest.raises(UsageError, match=r"--least-share must lie in \(0, 1\]"):
        RunConfig(federation=FederationConfig(least_share=share)).validate()


@pytest.mark.parametrize("seconds", [0, float("inf")])
def test_a_round_timeout_is_a_time(seconds: float) -> None:
    with pytest.raises(UsageError, match="--round-timeout must be positive"):
        RunConfig(federation=FederationConfig(round_timeout=seconds)).validate()


def test_the_round_timeout_reaches_the_grid(small) -> None:
    seen = []

    class Timed(LocalGrid):
        def send_and_receive(self, messages, *, timeout=None):
            seen.append(timeout)
            return super().send_and_receive(messages, timeout=timeout)

    config = changed(small, rounds=1, round_timeout=7.0)
    mean_of(config, Timed(APP, config.federation.clients))
    assert set(seen) == {7.0}
