"""Gradient matching against the `breaching` package, a step at a time, on the same model, batch and start.

Part of `speed`. What is timed is the difference of two runs of unequal length, so that set-up does not count; on a CPU
in processor time, so that other work on the machine counts little. Rounds are short and measure all ways in turn,
because a core's own speed drifts. A step is the same for all: signed Adam on cosine distance plus total variation.
On a GPU our steps are recorded once a run and replayed, as the attacks do it: their long run has many steps, beside
which the time of the recording, different from run to run, counts little.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from attacks.breaching import prepare_attack
from attacks.gradient_matching.engine import LoopSettings, minimise
from attacks.gradient_matching.evaluation import Candidates
from attacks.gradient_matching.gradients import Target
from attacks.gradient_matching.inverting_gradients import InvertingGradients
from attacks.gradient_matching.matched_update import extract_matched_update
from attacks.gradient_matching.simulation import build_simulation
from attacks.gradient_matching.unrolled import Simulation, math_attention
from experiments.speed.timing import peak_memory, timed
from fedmjp.audit.per_image import observe_groups
from fedmjp.data import load_gallery
from fedmjp.defenses import ClientInput
from fedmjp.devices import usable_device
from fedmjp.metrics.intervals import bootstrap_statistic
from fedmjp.models import build_model

TOGETHER = 8  # victims at once
SHORT, LONG, REPLAYED = 2, 12, 202  # steps; the last in the long run where they are replayed


class Searches:
    """The same search by the package and by ours.

    Args:
        model: its name; random weights.
        batch: images a victim.
    """

    def __init__(self, model: str, batch: int, device: str) -> None:
        self.device = usable_device(device)
        built = build_model(model, num_classes=100, weights="random")
        built.module.to(self.device).eval()
        images = load_gallery("photos", size=built.image_size, limit=TOGETHER * batch).images
        pixels = images.images(list(range(TOGETHER * batch))).to(self.device)
        labels = torch.arange(TOGETHER * batch, device=self.device) % 100
        self.views = observe_groups(built, ClientInput(pixels), labels, batch)
        self.labels = labels.unflatten(0, (TOGETHER, batch))  # (V, B)
        shape = (1, 1, batch, 3, built.image_size, built.image_size)
        self.start = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(self.device)
        self.recipe = InvertingGradients().recipe(self.views[0])

    def peer(self, steps: int = LONG) -> None:
        """The package's own."""
        prepare_attack(self.views[0], "invertinggradients", [f"optim.max_iterations={steps}"]).run(self.start[0, 0])

    def same(self, steps: int = LONG) -> None:
        """Ours with the package's arithmetic: autograd by every weight."""
        self._search(*self._simulation(1, exact=True), 1, steps)

    def alone(self, steps: int = LONG) -> None:
        """Ours, one victim."""
        self._search(*self._simulation(1), 1, steps)

    def together(self, steps: int = LONG) -> None:
        """Ours, all victims at once."""
        self._search(*self._simulation(TOGETHER), TOGETHER, steps)

    def _simulation(self, victims: int, *, exact: bool = False) -> tuple[Simulation, Target]:
        updates = [extract_matched_update(view) for view in self.views[:victims]]
        return build_simulation(self.views[0], updates, 1, exact=exact)

    def _search(self, simulation: Simulation, target: Target, victims: int, steps: int) -> None:
        def objective(candidates: Candidates, share: float) -> Tensor:
            with math_attention():
                found = simulation.gradients(candidates.images.flatten(0, 1), self.labels[:victims])
                losses = self.recipe.distance(found, target)[:, None]
                return losses + sum(prior(candidates.images) for prior in self.recipe.priors)

        start = Candidates(self.start.expand(victims, *self.start.shape[1:]))
        minimise(objective, start, self.recipe.optimiser, LoopSettings(steps, 0, 0.0, 0))


def matching_table(model: str, batches: tuple[int, ...], rounds: int, device: str) -> pd.DataFrame:
    """Milliseconds a step and victim, ratios of mean times with 95 % intervals over rounds, and peak memory."""
    return pd.DataFrame([line for batch in batches for line in _lines(model, batch, rounds, device)])


def _lines(model: str, batch: int, rounds: int, device: str) -> list[dict[str, object]]:
    searches = Searches(model, batch, device)
    works = {name: getattr(searches, name) for name in ("peer", "same", "alone", "together")}
    taken = np.zeros((rounds, len(works)))  # seconds of a step
    for number in range(-1, rounds):  # round -1 warms up and is overwritten by the last
        for column, (name, work) in enumerate(works.items()):
            replayed = searches.device.type == "cuda" and name != "peer"
            seconds = _step(work, searches.device, REPLAYED if replayed else LONG)
            taken[number, column] = seconds / (TOGETHER if name == "together" else 1)
    means = taken.mean(axis=0)
    ratios = np.stack(bootstrap_statistic(taken, lambda m: m[..., :1] / m), axis=1)  # (4, 3)
    lines = []
    for name, mean, (ratio, low, high) in zip(works, means, ratios, strict=True):
        line = {"model": model, "batch_size": batch, "way": name, "step_ms_mean": 1e3 * mean}
        line |= {"times_faster_mean": ratio, "times_faster_low": low, "times_faster_high": high}
        lines.append(line | {"peak_mib": peak_memory(Searches, (model, batch, device), name, searches.device)})
    return lines


def _step(work: Callable[[int], None], device: torch.device, steps: int) -> float:
    """Seconds of one step, from a run of so many and a short one."""
    short, long = (_seconds(partial(work, count), device) for count in (SHORT, steps))
    return (long - short) / (steps - SHORT)


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        return timed(work, device)
    start = time.process_time()
    work()
    return time.process_time() - start
