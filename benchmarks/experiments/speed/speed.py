"""The speed of the leakage benchmark and of gradient matching, as ratios taken in one run: `options.SpeedOptions`."""

from __future__ import annotations

from statistics import median
from types import SimpleNamespace
from typing import Literal

import pandas as pd
import torch
from rich.console import Console
from torch import Tensor

from attacks import ATTACKS, Attack, find_tokenizer
from attacks.breaching import ForBreaching
from experiments.rendering import csv
from experiments.session import prepare_torch
from experiments.speed.matching_speed import matching_table
from experiments.speed.options import SpeedOptions
from experiments.speed.timing import peak_memory, timed
from fedmjp.audit.campaign import run_attacks
from fedmjp.audit.harness import scorer
from fedmjp.audit.per_image import attacked_gradients
from fedmjp.audit.victims import Setting, Subject, Victims
from fedmjp.data import load_gallery
from fedmjp.defenses import DEFENSES, ClientInput
from fedmjp.metrics import load_lpips
from fedmjp.models import BuiltModel, build_model
from fedmjp.records import provenance
from fedmjp.records.run_record import note_run

FITTING = {"april": "april", "standard": "patch_embedding"}
ORIGINAL = Setting("a", defended=False, hidden=False, against="seen")
AIM_BARE, AIM_PEER = 1.35, 2.0
AIM_STEPS = {"same": 1.0, "together": 1.5}


class Bench:
    """One model on one block, with its victims."""

    def __init__(self, options: SpeedOptions, block: Literal["april", "standard"]) -> None:
        self.options, self.device = options, prepare_torch(options)
        built = build_model(options.model, num_classes=1000, weights="random", block=block)
        built.module.to(self.device).eval()
        self.subject, self.name = Subject(built), FITTING[block]
        gallery = load_gallery("photos", size=built.image_size, limit=options.images)
        self.victims = Victims(gallery, DEFENSES.get("none")(), seed=0, device=self.device, warn=print)
        lpips = load_lpips("squeeze", options.lpips_weights, self.device) if options.lpips_weights else None
        self.score = scorer(built.patch_size, lpips)
        self.attack: Attack = ATTACKS.get(self.name)()
        self.batches = [self.victims.decode(batch) for batch in self.victims.batches(options.batch_size)]

    def bare(self) -> None:
        """Forward and backward pass of every batch, gradients of all parameters."""
        for clients, images in self.batches:
            built = self.subject.built
            logits = built.module(built.normalise(images))
            loss = torch.nn.functional.cross_entropy(logits, self.victims.labels(built, clients))
            torch.autograd.grad(loss, list(built.module.parameters()))

    def ours(self) -> None:
        """Gradients, attack and scores of every image."""
        for clients, images in self.batches:
            run_attacks(self.victims, self.subject, [ORIGINAL], clients, images, {self.name: self.attack}, self.score)

    def ours_gradients(self) -> None:
        """The part of `ours` that makes the gradients."""
        for clients, images in self.batches:
            seen = ClientInput(images)
            self.victims.observe(self.subject.built, seen, clients, [self.attack])

    def scores(self) -> None:
        """The part of `ours` that scores."""
        for _, images in self.batches:
            self.score(images.flip(0), images)

    def peer(self) -> None:
        """The `breaching` package's user and AprilAttacker, image by image as they are made, with the same scoring."""
        built = self.subject.built
        mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (built.mean, built.std))
        user, attacker, payload = _breaching(built)
        for clients, images in self.batches:
            labels = self.victims.labels(built, clients)
            for b, image in enumerate(images):
                data = {"inputs": built.normalise(image[None]), "labels": labels[b : b + 1]}
                shared, _ = user.compute_local_updates(payload[0], custom_data=data)
                found, _ = attacker.reconstruct(payload, [shared], {})
                self.score((found["data"] * std + mean).clamp(0, 1), image[None])


def _breaching(built: BuiltModel):
    """The package's user, its attacker with the settings of its april_analytic.yaml, and the server's message."""
    from breaching.attacks.analytic_attack import AprilAttacker
    from breaching.cases.users import UserSingleStep

    model, loss = ForBreaching(built.module), torch.nn.CrossEntropyLoss()
    setup = {"device": torch.device("cpu"), "dtype": torch.float}
    quiet = {"gradient_noise": 0.0, "input_noise": 0.0}
    shares = {"provide_labels": True, "provide_num_data_points": True, "provide_buffers": False}
    sends = SimpleNamespace(num_data_points=1, local_diff_privacy=quiet, **shares)
    user = UserSingleStep(model, loss, SimpleNamespace(name="photos"), setup, 0, sends)
    user.data_key = "inputs"
    implementation = SimpleNamespace(dtype="float", mixed_precision=False, JIT=None)
    settings = SimpleNamespace(impl=implementation, normalize_gradients=False, solver="gelsd", label_strategy=None)
    shape = (3, built.image_size, built.image_size)
    metadata = SimpleNamespace(shape=shape, mean=built.mean, std=built.std, modality="vision")
    payload = {"parameters": list(model.parameters()), "buffers": list(model.buffers()), "metadata": metadata}
    return user, AprilAttacker(model, loss, settings, setup), [payload]


def measure(options: SpeedOptions, block: Literal["april", "standard"]) -> dict[str, object]:
    """One line of the table."""
    bench = Bench(options, block)
    works = {"bare": bench.bare, "ours": bench.ours, "gradients": bench.ours_gradients, "scores": bench.scores}
    if block == "april" and options.device == "cpu":
        works["peer"] = bench.peer
    taken: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(options.repeats + 1):
        for name, work in works.items():
            once = timed(work, bench.device)
            if repeat:  # the first round warms up
                taken[name].append(once / options.images)
    ratio = [o / b for o, b in zip(taken["ours"], taken["bare"], strict=True)]
    line = {"model": options.model, "block": block, "attack": bench.name}
    line |= {f"{name}_ms_median": 1e3 * median(values) for name, values in taken.items()}
    line |= {"ours_over_bare_median": median(ratio), "ours_over_bare_min": min(ratio), "ours_over_bare_max": max(ratio)}
    if "peer" in taken:
        faster = [p / o for p, o in zip(taken["peer"], taken["ours"], strict=True)]
        line |= {
            "peer_over_ours_median": median(faster),
            "peer_over_ours_min": min(faster),
            "peer_over_ours_max": max(faster),
        }
    line |= {
        f"{name}_peak_mib": peak_memory(Bench, (options, block), name, bench.device)
        for name in works
        if name in ("bare", "ours", "peer")
    }
    return line


def drivers(options: SpeedOptions) -> pd.DataFrame:
    """Milliseconds an image and error of G^T X = S, by driver, on the position gradients of one batch."""
    bench = Bench(options, "standard")
    clients, images = bench.batches[0]
    built = bench.subject.built
    gradients = attacked_gradients(built, images, bench.victims.labels(built, clients))
    tokenizer = find_tokenizer(built.module, (3, built.image_size, built.image_size))
    g = gradients[tokenizer.positions][:, 0, tokenizer.prefix :].double()  # (B, N, D)
    s = gradients[tokenizer.weight].flatten(2).double()  # (B, D, P)

    def svd() -> Tensor:
        u, sigma, vh = torch.linalg.svd(g, full_matrices=False)
        return u @ ((vh @ s) / sigma[..., None])

    def gram() -> Tensor:
        values, vectors = torch.linalg.eigh(g @ g.mT)
        return vectors @ ((vectors.mT @ (g @ s)) / values[..., None])

    works = {"svd (used)": svd, "eigh of G G^T": gram}
    for driver in ("gelsy", "gelsd", "gels") if options.device == "cpu" else ("gels",):
        works[driver] = lambda driver=driver: torch.linalg.lstsq(g.mT, s, driver=driver).solution
    truth = torch.nn.functional.unfold(built.normalise(images).double(), built.patch_size, stride=built.patch_size).mT
    lines = []
    for name, work in works.items():
        error = float((work() - truth).norm() / truth.norm())
        taken = median(timed(work, bench.device) for _ in range(options.repeats))
        lines.append({"driver": name, "image_ms_median": 1e3 * taken / len(images), "relative_error": error})
    return pd.DataFrame(lines)


def run(options: SpeedOptions, console: Console) -> None:
    """Measure, print, write."""
    options.out.mkdir(parents=True, exist_ok=True)
    if "leakage" in options.parts:
        _leakage(options, console)
    if "matching" in options.parts:
        _matching(options, console)


def _leakage(options: SpeedOptions, console: Console) -> None:
    table, solves = pd.DataFrame([measure(options, block) for block in FITTING]), drivers(options)
    (options.out / "speed.csv").write_text(csv(table, 4))
    (options.out / "drivers.csv").write_text(csv(solves, 4))
    measured = {"images": options.images, "batch_size": options.batch_size, "repeats": options.repeats}
    _note(options, leakage=measured | {"lpips": options.lpips_weights is not None})
    console.print(table.T.to_string(header=False, float_format=lambda v: f"{v:.3g}"), highlight=False)
    console.print(solves.to_string(index=False, float_format=lambda v: f"{v:.3g}"), highlight=False)
    lpips = "LPIPS included" if options.lpips_weights else "without LPIPS (pass --lpips-weights)"
    worst = table["ours_over_bare_median"].max()
    console.print(f"our path / bare forward and backward pass: {worst:.2f} at worst (aim {AIM_BARE}), {lpips}")
    if "peer_over_ours_median" in table:
        console.print(f"breaching / our path: {table['peer_over_ours_median'].max():.2f} (aim {AIM_PEER})")


def _matching(options: SpeedOptions, console: Console) -> None:
    table = matching_table(options.matching_model, options.matching_batches, options.matching_rounds, options.device)
    (options.out / "matching.csv").write_text(csv(table, 4))
    _note(options, matching={"rounds": options.matching_rounds})
    console.print(table.to_string(index=False, float_format=lambda v: f"{v:.3g}"), highlight=False)
    for way, aim in AIM_STEPS.items():
        worst = table[table["way"] == way]["times_faster_mean"].min()
        console.print(f"steps a second, breaching's = 1, {way}: {worst:.2f} at worst (aim {aim})", highlight=False)


def _note(options: SpeedOptions, **part: dict[str, object]) -> None:
    """Note one part in run.json, with the commit and machine of its own."""
    (name, measured), columns = next(iter(part.items())), provenance.columns(prepare_torch(options))
    note_run(options.out, "python benchmarks/speed.py", devices=[columns["device"]], **{name: columns | measured})
