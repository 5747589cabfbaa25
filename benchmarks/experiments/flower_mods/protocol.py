"""Federations of Flower's own strategies and mods, attacked at the tap; the protocol stands in `options.Options`."""

from __future__ import annotations

import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import strategy as flower
from rich.console import Console
from torch import Tensor

from attacks import ATTACKS, Reconstruction, UsageError
from experiments.flower_mods.options import Options
from experiments.flower_mods.render import FLOWER_MODS
from experiments.session import TableRun
from fedmjp.audit import Watcher
from fedmjp.audit.harness import Scored, score_found
from fedmjp.audit.victims import Subject
from fedmjp.defenses import DEFENSES
from fedmjp.federation import TapGrid
from fedmjp.federation.local_grid import LocalGrid
from fedmjp.federation.tap import WrappedGrid
from fedmjp.models import build_model
from fedmjp.models.weights import IMAGENET_CLASSES, classes_of
from fedmjp.records.rows import BASELINES, RowLog

DELTA = 1e-5


def run(options: Options, console: Console) -> None:
    """Attack, then write the table and print it."""
    FlowerMods(options, console)()


@dataclass(frozen=True)
class Protected:
    """A federation under one of Flower's mods.

    Attributes:
        name: for a table.
        mods: of the ClientApp.
        parameters: that the mod and its strategy were given.
    """

    name: str
    mods: list[Any] = field(default_factory=list)
    parameters: dict[str, float] = field(default_factory=dict)

    def strategy(self, clients: int) -> flower.Strategy:
        """FedAvg, in the wrapper that the mod needs."""
        plain = flower.FedAvg(fraction_evaluate=0.0, min_available_nodes=clients)
        noise, norm = (self.parameters.get(name) for name in ("noise_multiplier", "clipping_norm"))
        if fixedclipping_mod in self.mods:
            return flower.DifferentialPrivacyClientSideFixedClipping(plain, noise, norm, clients)
        if adaptiveclipping_mod in self.mods:
            wrapper = flower.DifferentialPrivacyClientSideAdaptiveClipping
            return wrapper(plain, noise, clients, initial_clipping_norm=norm)
        return plain


def protections(options: Options) -> Iterator[Protected]:
    """Every federation of the table."""
    norm = {"clipping_norm": options.clipping_norm}
    central = norm | {"noise_multiplier": options.noise_multiplier}
    yield Protected("FedAvg")
    yield Protected("Flower fixedclipping_mod", [fixedclipping_mod], central)
    yield Protected("Flower adaptiveclipping_mod", [adaptiveclipping_mod], central)
    for epsilon in options.epsilons:
        mod = LocalDpMod(options.clipping_norm, options.clipping_norm, epsilon, DELTA)
        parameters = norm | {"epsilon": epsilon, "delta": DELTA}
        yield Protected(f"Flower LocalDpMod epsilon {epsilon:g}", [mod], parameters)


class Collected(WrappedGrid):
    """A grid that gives replies as a list, as Flower's own do; its strategies for privacy read them twice."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Every reply."""
        return list(self._grid.send_and_receive(messages, timeout=timeout))


class FlowerMods(TableRun):
    """One call of the benchmark."""

    program, rendering = "flower_mods", FLOWER_MODS

    def attack(self, rows: RowLog) -> str:
        """Write every row that is missing; returns the images' provenance."""
        o = self.options
        classes = classes_of(o.model, o.weights) or IMAGENET_CLASSES
        self.built = build_model(o.model, num_classes=classes, weights=o.weights, seed=o.seed)
        gallery = self.session.gallery(o.images, size=self.built.image_size, path=o.data_path)
        if len(gallery.images) < o.clients:
            raise UsageError(f"--images {o.images} has {len(gallery.images)} images for {o.clients} --clients")
        self.victims = self.session.victims(gallery, DEFENSES.get("none")(), o.seed)
        self.score = self.session.scorer(self.built.patch_size)
        _, self.images = self.victims.decode(list(range(o.clients)))
        self.labels = gallery.images.labels[: o.clients] % classes
        for protected in protections(o):
            names = (*BASELINES, *o.attacks) if protected.name == "FedAvg" else o.attacks
            cases = {name: self.case(protected, name) for name in names}
            places = range(o.clients)
            if not all(rows.done(case, self.victims.ids(place)) for case in cases.values() for place in places):
                self.write(protected, cases, rows)
        return gallery.provenance

    def case(self, protected: Protected, name: str) -> dict[str, Any]:
        """The values that identify a row (`records.rows.CASE`)."""
        parameters = {} if name in BASELINES else ATTACKS.get(name)().parameters()
        setting = f"weights after one step of {self.options.learning_rate:g}"
        own = {"defense_parameters": protected.parameters, "update": "weights"}
        number = self.options.rounds
        subject = None if name in BASELINES else Subject(self.built)
        return self.victims.case(subject, protected.name, setting, name, parameters, round=number) | own

    def write(self, protected: Protected, cases: dict[str, dict[str, Any]], rows: RowLog) -> None:
        """Run one federation and write the rows of its last round."""
        answers = self.federate(protected)
        for client, originals in enumerate(self.images.split(1)):
            for name, case in cases.items():
                if rows.done(case, self.victims.ids(client)):
                    continue
                if name in BASELINES:
                    scored = self.guess(name, client, originals)
                else:
                    found = answers.get((client, name), Reconstruction(images=None, diagnosis="no reply was attacked"))
                    scored = score_found(ATTACKS.get(name)(), name, [found], [originals], self.score)[0]
                row = scored.row(case, self.victims.ids(client)[0], float("nan"))
                rows.append({**self.session.columns, **row})

    def guess(self, name: str, client: int, originals: Tensor) -> Scored:
        """What needs no gradient."""
        mean = name == BASELINES[0]
        image = self.victims.mean_image(1) if mean else self.victims.others([client], originals)
        return Scored(name, {}, image, self.score(image, originals), 0.0, "")

    def federate(self, protected: Protected) -> dict[tuple[int, str], Reconstruction]:
        """The answers to the last round's replies, by client and attack."""
        o, seen = self.options, Counter[tuple[int, str]]()
        np.random.seed(o.seed)  # which Flower draws its noise from
        settings = {"learning_rate": o.learning_rate, "batch_size": 1, "local_steps": 1, "optimiser": "sgd"}
        size, found = self.built.image_size, {}
        with tempfile.TemporaryDirectory() as folder:
            shape, out = (3, size, size), Path(folder) / "leaks"
            moments = {"mean": self.built.mean, "std": self.built.std}
            with Watcher(
                self.built.module, image_shape=shape, attacks=o.attacks, out=out, **moments, **settings
            ) as watcher:
                grid = TapGrid(Collected(LocalGrid(self.client_app(protected), o.clients)), watcher)
                arrays = ArrayRecord(self.built.module.state_dict())
                protected.strategy(o.clients).start(grid, arrays, num_rounds=o.rounds)
            for problem in watcher.problems:
                self.session.say(f"{protected.name}: {problem}")
            for node, name, answer in watcher.found:
                seen[node, name] += 1
                if seen[node, name] == o.rounds:
                    found[node - 1, name] = answer
        return found

    def client_app(self, protected: Protected) -> ClientApp:
        """A client that takes one step of SGD on its image and returns its weights."""
        app = ClientApp(mods=protected.mods)
        built, images, labels, rate = self.built, self.images, self.labels, self.options.learning_rate

        @app.train()
        def train(message: Message, context: Context) -> Message:
            """One step, and the weights after it."""
            weights = message.content["arrays"].to_torch_state_dict()
            client = int(context.node_config["partition-id"])
            own = {name: w.clone().requires_grad_() for name, w in weights.items()}
            with torch.enable_grad():
                inputs = (built.normalise(images[client : client + 1]),)
                logits = torch.func.functional_call(built.module, own, inputs)
                loss = torch.nn.functional.cross_entropy(logits, labels[client : client + 1])
                found = torch.autograd.grad(loss, list(own.values()), allow_unused=True)
            sent = {n: w if g is None else w - rate * g for (n, w), g in zip(weights.items(), found, strict=True)}
            metrics = MetricRecord({"num-examples": 1, "loss": float(loss.detach())})
            return Message(RecordDict({"arrays": ArrayRecord(sent), "metrics": metrics}), reply_to=message)

        return app
