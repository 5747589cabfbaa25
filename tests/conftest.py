"""What the tests of several rooms share: photographs, a model's honest update, optional data beside the checkout."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from attacks import Observation, ThreatModel
from fedmjp.audit.observe import model_as_sent, observe_step, observe_update
from fedmjp.client import ClientTask
from fedmjp.config import ModelConfig
from fedmjp.data import load_data
from fedmjp.defenses import DEFENSES
from fedmjp.models import BuiltModel, build_model
from fedmjp.objectives import Draws, Learner, client_loss, read_objective
from tests.durations import slow_tests

THREADS = torch.get_num_threads()
RENDER = Figure.savefig
SHARED = Path(__file__).resolve().parent.parent.parent / "shared"


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is listed as slow, and put files with slow tests first: the last one that a process takes keeps the
    others waiting."""
    listed = slow_tests()
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.slow)
    slow = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector does not look through it again, which is a third of a second each.

    Without it the collector would take the rest for young, and look through all of that the more often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], 50)


def shared_file(relative: str) -> Path:
    """A file beside the checkout, or a skip that says what is missing."""
    path = SHARED / relative
    if not path.exists():
        pytest.skip(f"needs {relative} in a folder 'shared' beside the checkout")
    return path


def photographs(size: int, count: int) -> Tensor:
    """(count, 3, size, size) in [0, 1]: crops of scikit-image's photographs."""
    return load_data("photos", size=size).train.images(list(range(count)))


def observe(
    model: BuiltModel, images: Tensor, labels: Tensor | None = None, mask: Tensor | None = None, **changes
) -> Observation:
    """The honest update of one step on `images`, as a server sees it."""
    labels = torch.arange(len(images)) if labels is None else labels
    loss = client_loss(model, images, labels, mask, {})
    names, parameters = zip(*model.module.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    gradients = {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, found, strict=True)}
    view = {
        "gradients": gradients,
        "model": model.module,
        "num_examples": len(images),
        "image_shape": tuple(images.shape[1:]),
        "mean": model.mean,
        "std": model.std,
    }
    return Observation(**(view | changes))


def leave_undrawn(patched: pytest.MonkeyPatch) -> None:
    """Figures become blank pictures, for runs whose rows and words count: drawing takes a third of a small run."""

    patched.setattr(Figure, "savefig", lambda figure, path, **options: save_blank(path))


@contextmanager
def interrupted_at(owner: Any, name: str, number: int) -> Iterator[list[tuple]]:
    """The user's interrupt (KeyboardInterrupt) instead of one call of a function or method; what is given lists the
    arguments of every call.

    Args:
        owner: the class or module that holds it as `name`.
        number: of that call, from 1; later ones are honest again.
    """
    honest, calls = getattr(owner, name), []

    def stopping(*arguments, **named):
        calls.append(arguments)
        if len(calls) == number:
            raise KeyboardInterrupt
        return honest(*arguments, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, stopping)
        yield calls


def save_blank(path: Path) -> None:
    """A picture of one pixel, PNG or PDF."""
    Image.new("RGB", (1, 1)).save(path, dpi=(72, 72))


@pytest.fixture(scope="session", autouse=True)
def laid_out() -> Iterator[None]:
    """Figures are laid out and become blank pictures, but under `drawn`: fonts in PDF take a third of a small run."""

    def savefig(figure: Figure, path: Path, **options) -> None:
        if Path(path).suffix == ".png":
            figure.draw_without_rendering()
        save_blank(path)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Figure, "savefig", savefig)
        yield


@pytest.fixture(scope="session", autouse=True)
def options_read_once() -> Iterator[None]:
    """The source of a class of options is split into tokens once, not for every command line: half of its time."""
    try:
        from tyro._docstrings import _ClassTokenization as Tokens
    except ImportError:  # another version of tyro: command lines take longer
        yield
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Tokens, "make", staticmethod(cache(Tokens.make)))
        yield


@pytest.fixture(scope="module")
def drawn() -> Iterator[None]:
    """Figures are drawn, for tests that look at them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Figure, "savefig", RENDER)
        yield


@pytest.fixture(scope="session", autouse=True)
def not_waiting_for_the_disk() -> Iterator[None]:
    """What a process has written stays when it ends; only a machine that fails needs more, and no test stops one."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def threads_of_the_process() -> Iterator[None]:
    """A run's `--threads` lasts no longer than its test: two processes of two threads each wait for one another."""
    torch.set_num_threads(THREADS)  # fixtures of wider scopes have run
    yield
    torch.set_num_threads(THREADS)


@pytest.fixture
def undrawn(monkeypatch) -> None:
    """See `leave_undrawn`; fixtures of wider scopes lay theirs out."""
    leave_undrawn(monkeypatch)


@pytest.fixture(scope="session")
def mini() -> BuiltModel:
    """The small ViT for 64 pixels, random weights."""
    return build_model("vit_mini_64", num_classes=8, weights="random")


def federated_rounds(task: ClientTask, rounds: int) -> Iterator[tuple[int, dict[str, Tensor], list]]:
    """(number, weights sent, gradient of each client by name) of FedSGD without Flower, by the mean gradient."""
    weights = {n: p.detach().clone() for n, p in task.parameters.items()}
    for number in range(1, rounds + 1):
        sent = {n: w.clone() for n, w in weights.items()}
        updates = [task.update(client, number, sent).tensors for client in range(len(task.parts))]
        yield number, sent, updates
        rate = task.config.federation.learning_rate / len(updates)
        weights = {n: w - rate * sum(update[n] for update in updates) for n, w in weights.items()}


def observed_update(
    task: ClientTask, sent: dict[str, Tensor], received: dict[str, Tensor], number: int, **changes
) -> Observation:
    """What the server sees of an update of `federated_rounds`, of client 0 unless `changes` name another."""
    model = model_as_sent(task.model.module, sent)
    given = {"round": number, "client": 0, "sent": sent, "received": received} | changes
    return observe_update(task, ThreatModel(), model=model, **given)


def observe_under(objective: str, model: str, images: Tensor, seed: int = 0, weights: str = "random") -> Observation:
    """The update of one step under an objective, as NAME:option=value; in the images' type.

    Args:
        seed: of the defence's draws; the objective's are of seed + 1.
    """
    learner = learner_under(objective, model, weights)
    for module in filter(None, (learner.model.module, learner.local)):
        module.to(images.dtype)
    return observe_step(learner, images, Draws.seeded(seed, seed + 1))[0]


def learner_under(objective: str, model: str, weights: str = "random") -> Learner:
    """An undefended model with the objective's heads."""
    config, device = ModelConfig(model, weights), torch.device("cpu")
    return Learner.build(
        read_objective(objective), DEFENSES.get("none")(), config, num_classes=8, seed=0, device=device
    )
