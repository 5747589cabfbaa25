"""Random replies that no honest client sends: the boundary, the Watcher and the audited federation withstand them.

2,000 cases; `make fuzz` runs more. What cannot be read is refused in one line, in memory that does not depend on what a
header claims; no wrong image is vouched for. Finite lies pass, and no wrong image is certified.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from rich.console import Console

from attacks import ThreatModel, UsageError
from fedmjp.audit import Watcher
from fedmjp.audit.watcher import SENDS
from fedmjp.audited_federation import run_on_grid
from fedmjp.config import RunConfig
from fedmjp.federation import ActiveServer
from fedmjp.federation.client_app import build_client_app
from fedmjp.federation.local_grid import LocalGrid
from fedmjp.federation.wire import flat
from fedmjp.messages import tensors_of
from fedmjp.metrics import psnr
from fedmjp.progress import RunProgress
from fedmjp.records.failures import load_failures
from fedmjp.records.rows import load_rows
from fedmjp.records.run_folder import RunFolder
from tests.audit.test_user_model import gradients_of
from tests.conftest import photographs
from tests.federation.conftest import changed
from tests.federation.malformed import LIES, MALFORMED, copy_of, flipped, put, with_array, with_bytes

CASES = int(os.environ.get("FEDMJP_FUZZ", "2000"))  # `make fuzz` runs more
# Shares of the cases, after what one takes: the others go to the boundary alone.
WATCHED, LYING_CLIENTS = CASES // 20, CASES // 140
TOGETHER = 500  # replies to one Watcher
CLIENTS = 90  # of one federation, at most: there are 96 photographs
RIGHT = 25  # dB, above which an image is the client's
CHANGES = [*MALFORMED.values(), with_bytes(flipped)]


def test_fuzz_the_boundary(good) -> None:
    """Random changes of random kinds: refused in a line, or of the values that were sent; memory stays small.

    So does that of reading a user's own messages.
    """
    expected, content = good
    generator = np.random.default_rng(7)
    tracemalloc.start()
    for number in range(CASES - WATCHED - LYING_CLIENTS):
        bad = copy_of(content)
        CHANGES[number % len(CHANGES)](bad, generator)
        reason = expected.why_not(bad, 1)
        if not number % 5:  # no divisor of the number of kinds
            with contextlib.suppress(UsageError):
                tensors_of(bad)
        if not reason:  # a changed byte of the header may leave its meaning
            assert np.array_equal(bad["update"]["parameters"].numpy(), content["update"]["parameters"].numpy())
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()


class Unforeseen(BaseException):
    """An error that the Watcher would turn into a problem's line, and that is one of ours."""


class Strict(Watcher):
    """A Watcher that tells the errors it foresees from others."""

    def _attack(self, *arguments) -> None:
        try:
            super()._attack(*arguments)
        except Exception as error:
            if not isinstance(error, UsageError):
                raise Unforeseen(f"{type(error).__name__}: {error}") from error
            raise


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **small).eval()


@pytest.fixture(scope="module")
def gradients(model) -> dict[str, np.ndarray]:
    return {name: gradient.numpy() for name, gradient in gradients_of(model, photographs(32, 1), [2], std=0.5).items()}


def watchers(model, out: Path, count: int) -> Iterator[tuple[int, Strict]]:
    """(number, Watcher) for each of `count` replies; a new Watcher after some, when the old one has written its page.

    Weights are sent to the first, gradients to the second, and so on. Answers are the first photograph; those that are
    not have a diagnosis, or rest on a lie and are not certified.
    """
    view = {"image_shape": (3, 32, 32), "mean": [0.5] * 3, "std": [0.5] * 3, "batch_size": 1, "local_steps": 1}
    for first in range(0, count, TOGETHER):
        sends = SENDS[first // TOGETHER % 2]
        watcher = Strict(model, attacks=("patch_embedding",), sends=sends, learning_rate=1.0, out=out, **view)
        yield from ((number, watcher) for number in range(first, min(first + TOGETHER, count)))
        watcher.finish()
        assert not any("page" in problem for problem in watcher.problems)
        answers = [(node, found) for node, _, found in watcher.found if found.images is not None]
        assert any(found.certified for _, found in answers)
        for node, found in answers:
            malformed = not node % 2
            if found.certified or (malformed and not found.diagnosis):
                assert float(psnr(found.images, photographs(32, 1))[0]) > RIGHT


def arrays(model, gradients: Mapping[str, np.ndarray], sends: str) -> ArrayRecord:
    """What a client sends of these gradients."""
    sent = {name: p.detach().numpy() for name, p in model.named_parameters()} if sends == "weights" else {}
    return ArrayRecord({name: Array((sent[name] - g) if sent else g) for name, g in gradients.items()})


def lying(gradients: Mapping[str, np.ndarray], number: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Finite values of one array, or of all of them, are wrong."""
    lie, name = list(LIES.values())[number % len(LIES)], generator.choice([*gradients, ""])
    return {n: lie(g, generator).astype(np.float32) if name in ("", n) else g for n, g in gradients.items()}


def peak_mebibytes() -> float:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def test_fuzz_the_watcher(model, gradients, undrawn, tmp_path) -> None:
    """Malformed arrays of a user's own app, and finite lies in turn: a problem's line names the node.

    What is read and what is attacked fit into the memory that the process has held, and little more.
    """
    before_all = peak_mebibytes()
    sent, generator = RecordDict({"arrays": ArrayRecord(model.state_dict())}), np.random.default_rng(8)
    for number, watcher in watchers(model, tmp_path / "leaks", WATCHED):
        before, kind, good = len(watcher.problems), number // 2, arrays(model, gradients, watcher.sends)
        if number % 2:
            reply = arrays(model, lying(gradients, kind, generator), watcher.sends)
        else:
            reply = with_array(CHANGES[kind % len(CHANGES)], good, str(generator.choice(list(good))), generator)
        watcher(sent, RecordDict({"arrays": reply}), number)
        for problem in watcher.problems[before:]:
            assert problem.startswith(f"round 1, node {number}: ")
            assert len(problem) < 500
    assert watcher.problems
    assert peak_mebibytes() - before_all < 300


def test_an_active_server_withstands_malformed_replies(model, gradients, undrawn, tmp_path) -> None:
    """In sums of two clients; what the strategy gets in place of a reply has the types that it has sent."""
    view = {"image_shape": (3, 32, 32), "mean": [0.5] * 3, "std": [0.5] * 3, "sends": "gradient", "batch_size": 1}
    grants = ThreatModel.parse(["model_weights", "position_gradient", "active_parameters"])
    watcher = Strict(model, attacks=("fishing",), threat_model=grants, out=tmp_path / "leaks", local_steps=1, **view)
    generator = np.random.default_rng(10)
    sent, good = RecordDict({"arrays": ArrayRecord(model.state_dict())}), arrays(model, gradients, "gradient")
    for change in (*CHANGES, MALFORMED["one NaN"]):
        server = ActiveServer(watcher, sum_of=2)
        turns = [server.prepare(copy_of(sent), node) for node in (1, 2)]
        bad = RecordDict({"arrays": with_array(change, good, "norm.bias", generator)})
        server(turns[0].content, RecordDict({"arrays": good}), 1)
        server(turns[1].content, bad, 2)
        passed = turns[1].pass_on(bad)["arrays"]
        assert all(passed[name].dtype == "float32" for name in gradients if name in passed)
    server.round_done()
    assert any("node 2's reply is in no sum: the array 'norm.bias' cannot be read" in p for p in watcher.problems)
    assert any("in no sum: its array 'norm.bias' holds NaN" in problem for problem in watcher.problems)
    assert watcher.problems[-1].endswith("lacks a reply: it was not attacked")


class Lying(LocalGrid):
    """A grid of clients that send finite lies, each of another kind."""

    def __init__(self, config: RunConfig, generator: np.random.Generator) -> None:
        super().__init__(build_client_app(config.client_entropy()), config.federation.clients)
        self.generator = generator
        # The mean of the largest numbers is not finite, which stops a run (test_boundary.py).
        self.lies = [lie for name, lie in LIES.items() if name != "largest numbers"]

    def send_and_receive(self, messages, *, timeout=None):
        for place, message in enumerate(messages):
            reply = self._deliver(message)
            if reply.has_content() and "update" in reply.content:
                values = flat(reply.content["update"]["parameters"]).numpy()
                lie = self.lies[place % len(self.lies)](values, self.generator)
                put(reply.content, lie.astype(np.float32))
            yield reply


def test_fuzz_lying_clients(small) -> None:
    """The run ends as others do, and every certified image is the client's."""
    certified = []
    for first in range(0, LYING_CLIENTS, CLIENTS):
        clients = min(CLIENTS, LYING_CLIENTS - first)
        config = changed(small, model="vit_micro_32", clients=clients, rounds=1, batch_size=1, test_limit=2, seed=first)
        audited = ",".join(map(str, range(clients)))
        config = changed(config, audit_clients=audited, learning_rate=1e-30, out=str(small.out / str(first)))
        folder, progress = RunFolder(config), RunProgress(Console(file=io.StringIO()))
        run_on_grid(Lying(config, np.random.default_rng(first)), config, folder, progress)
        rows = load_rows(config.out / "rows.jsonl")
        assert load_failures(config.out) == []
        assert (rows["attack"] == "patch_embedding").sum() == clients
        certified += rows.loc[rows["certified"].eq(True), "psnr"].tolist()
    assert len(certified) > LYING_CLIENTS // len(LIES)
    assert min(certified) > RIGHT
