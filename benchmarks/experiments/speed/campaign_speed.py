"""The wall-clock time of one campaign in one process, in several, and on Ray: `options.CampaignOptions`."""

from __future__ import annotations

import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console

from attacks import ATTACKS
from experiments.rendering import csv
from experiments.scaffold import Failure
from experiments.speed.options import CampaignOptions
from experiments.speed.render import CAMPAIGN, SERIAL
from fedmjp.audit.campaign import Campaign
from fedmjp.audit.harness import scorer
from fedmjp.audit.victims import Setting, Subject, Victims
from fedmjp.data import load_gallery
from fedmjp.defenses import DEFENSES
from fedmjp.devices import usable_device
from fedmjp.models import build_model
from fedmjp.models.weights import IMAGENET_CLASSES, classes_of
from fedmjp.records import provenance
from fedmjp.records.files import write_whole
from fedmjp.records.rows import RowLog
from fedmjp.records.run_record import note_run
from fedmjp.report.columns import TEXT
from fedmjp.workers import HERE, WorkerConfig, in_order

MASKED = Setting("masked", defended=True, hidden=True, against="original")


def executors(options: CampaignOptions) -> dict[str, WorkerConfig]:
    """Where the campaign is computed, by the command line that asks for it."""
    count = options.workers
    found = {SERIAL: HERE, f"--workers {count}": WorkerConfig(count)}
    if options.ray:
        found[f"--ray {options.ray} --workers {count}"] = WorkerConfig(count, options.ray)
    return found


class Bench:
    """The campaign, to be run again and again."""

    def __init__(self, options: CampaignOptions) -> None:
        torch.set_num_threads(1)
        self.options, self.device = options, usable_device("cpu")
        defense = DEFENSES.get("mjp")(gamma=options.gamma)
        name = defense.model_name(options.model)
        classes = classes_of(name, options.weights) or IMAGENET_CLASSES
        self.subject = Subject(build_model(name, num_classes=classes, weights=options.weights, seed=0))
        gallery = load_gallery(options.images, size=self.subject.built.image_size, limit=options.num_images)
        self.victims = Victims(gallery, defense, seed=0, device=self.device, warn=print)

    def campaign(self, config: WorkerConfig) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """The times of one campaign by column, and its rows without their own seconds."""
        with tempfile.TemporaryDirectory() as folder, RowLog(Path(folder) / "rows.jsonl") as rows:
            campaign = Campaign(
                self.victims,
                defense="mjp",
                attacks={"mjp_subspace": ATTACKS.get("mjp_subspace")()},
                rows=rows,
                columns={"run_id": "speed", **provenance.columns(self.device)},
                score_images=scorer(self.subject.built.patch_size, None),
                batch_size=self.options.batch_size,
                on_batch=lambda count, psnr: None,
                workers=config,
            )
            before = cpu_seconds()
            start = time.perf_counter()
            campaign.attack(self.subject, [MASKED])
            seconds = time.perf_counter() - start
            own, others = (after - earlier for after, earlier in zip(cpu_seconds(), before, strict=True))
            found = [{k: v for k, v in row.items() if k != "seconds"} for row in rows.rows()]
        if config.ray:  # whose processes are not this one's children
            return {"seconds": seconds, "cpu_seconds": float("nan"), "core_seconds": float("nan")}, found
        shared = own + others / (config.workers or 1)
        return {"seconds": seconds, "cpu_seconds": own + others, "core_seconds": shared}, found


def cpu_seconds() -> tuple[float, float]:
    """CPU time of this process, and of its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    own, others = (one.ru_utime + one.ru_stime for one in used)
    return own, others


def measure(options: CampaignOptions, console: Console, known: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """The runs so far, after each one.

    Args:
        known: the runs of an earlier call.

    Raises:
        Failure: rows of two executors differ.
    """
    bench, runs, columns = Bench(options), known.to_dict("records"), provenance.columns(torch.device("cpu"))
    done = {(run["repeat"], run["executor"]) for run in runs}
    for config in executors(options).values():  # start Ray and its processes before anything is timed
        list(in_order(range(options.workers), torch.zeros, config))
    for repeat in range(options.repeats):
        expected: str | None = None
        for name, config in executors(options).items():
            if (repeat, name) in done:
                continue
            load = os.getloadavg()[0]
            times, rows = bench.campaign(config)
            text = json.dumps(rows, sort_keys=True)
            if expected is not None and text != expected:
                raise Failure(f"the rows of {name} are not those of the executor before it")
            expected = text
            about = {"model": bench.subject.built.name, "weights": bench.subject.built.provenance}
            about |= {"gamma": options.gamma, "batch_size": options.batch_size, "executor": name, "repeat": repeat}
            about |= {"count": len(rows), **times, "load": load}
            runs.append(about | {"device": columns["device"], "commit": columns["commit"]})
            line = f"{name}: {times['seconds']:.1f} s, {times['core_seconds']:.1f} s of a core's CPU time, "
            console.print(line + f"{len(rows)} images, load average {load:.1f}", highlight=False)
            yield pd.DataFrame(runs)


def run(options: CampaignOptions, console: Console) -> None:
    """Measure, write and print the table."""
    file = options.out / "runs.csv"
    known = pd.read_csv(file, dtype=TEXT) if options.resume and file.exists() else pd.DataFrame()
    options.out.mkdir(parents=True, exist_ok=True)
    runs = known
    for runs in measure(options, console, known):
        write_whole(file, csv(runs, 6).encode())
    CAMPAIGN.write(options.out)
    machine = {"cores": os.cpu_count(), "images": options.images.rpartition("/")[2]}
    program, commits = "python benchmarks/campaign_speed.py", runs["commit"]
    fresh = not options.resume
    note_run(options.out, program, devices=runs["device"], commits=commits, overwritten=fresh, **machine)
    console.print(pd.read_csv(options.out / "table.csv").round(2).to_string(index=False), highlight=False)
