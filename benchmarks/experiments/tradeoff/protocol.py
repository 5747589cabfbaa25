"""Federations under several defences: trained, attacked while they train, and gathered into one table.

*One federation, not two*: learning wants large batches and closed forms invert batches of one, so many clients send
the gradient of one image each (FedSGD). What the table can tell and what it cannot: `table.NOTES`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import pandas as pd
from rich.console import Console

from attacks import UsageError
from attacks.observation import SUPERVISED
from experiments.client_recipes import PLAIN, recipe_of, with_recipe
from experiments.federations import gather_rows, reasons_not_run, run_federation
from experiments.rendering import read_rows
from experiments.scaffold import Failure
from experiments.tradeoff.encoders import measure_encoder, read_encoder
from experiments.tradeoff.options import NOPE, Options
from experiments.tradeoff.reidentified import measure_ranks, read_ranks
from experiments.tradeoff.render import OBJECTIVES, RANKS, TRADEOFF
from experiments.tradeoff.table import STRENGTHS, placed, point_of, under_objective, under_recipe
from fedmjp.audit.aggregate import sum_in_words
from fedmjp.before_start import check_before_start
from fedmjp.budgets import AUTO, searches
from fedmjp.config import AuditConfig, DataConfig, EncoderConfig, FederationConfig, ModelConfig, RunConfig
from fedmjp.defenses import DEFENSES, Defense
from fedmjp.defenses.chain import split_chain
from fedmjp.federation import ClientFailure
from fedmjp.models import split_name
from fedmjp.models.weights import shipped_weights
from fedmjp.records.files import write_whole
from fedmjp.records.rows import load_rows
from fedmjp.records.run_folder import RunFolder, test_images_of
from fedmjp.records.run_record import note_rows
from fedmjp.settings import split_entry

SHOWN = [
    "partition",
    "point",
    "attack",
    "psnr_mean",
    "psnr_low",
    "psnr_high",
    "gain_mean",
    "accuracy_mean",
    "strongest",
]
KINDS = ("none", NOPE, "mjp", "noise")  # come first, others by name


@dataclass(frozen=True)
class Federation:
    """One federation of the plane."""

    config: RunConfig

    @property
    def partition(self) -> str:
        """How the training images are distributed over the clients."""
        return self.config.federation.partition

    @property
    def point(self) -> str:
        """Its defence with its strength, in words."""
        (name,) = self.config.defense
        own = point_of(name, vars(self.config.defence(name)), self.config.model.model)
        own = under_recipe(under_objective(own, split_entry(self.config.objective, "--objective")[0]), self.recipe)
        return own + sum_in_words(self.config.audit.secure_aggregation, alone=False)

    @property
    def recipe(self) -> str:
        """How its clients train."""
        return recipe_of(self.config)

    @property
    def title(self) -> str:
        """For a line of progress."""
        return f"{self.partition}, {self.point}, seed {self.config.seed}"

    def order(self) -> tuple:
        """Sort key of table and figure."""
        kind = self.point.split(",")[0]
        place = KINDS.index(kind) if kind in KINDS else len(KINDS)
        defense = self.config.defence(self.config.defense[0])
        strength = next((getattr(defense, option) for option in STRENGTHS if hasattr(defense, option)), 0.0)
        group = self.config.audit.secure_aggregation
        return (self.partition != "iid", self.partition, place, strength, group, self.point, self.config.seed)


def federations(options: Options) -> Iterator[Federation]:
    """Every federation that is asked for, in the order in which they run: all defences on one partition first."""
    for seed, partition, group, recipe, objective, name in product(
        options.seeds,
        options.partitions,
        options.secure_aggregation,
        options.recipes,
        options.entries(),
        options.defenses,
    ):
        if name != NOPE or objective == SUPERVISED:
            config = replace(with_recipe(_base(options, partition, group, seed), recipe), objective=objective)
            for defense in options.strengths(name):
                yield _federation(options, config, name, defense)


def _federation(options: Options, config: RunConfig, name: str, defense: Defense) -> Federation:
    if name == NOPE:
        config = replace(config, model=replace(config.model, model=f"{options.model}_nope"))
    else:
        # A strength stands in the options; other entries hold their own, beside what these options say of their parts.
        parts = [part for part, _ in split_chain(name) if hasattr(options.options, part)]
        stated = {part: defense if name in DEFENSES else getattr(options.options, part) for part in parts}
        config = replace(config, defense=(name,), options=replace(config.options, **stated))
    words = Federation(config).title.replace(" = ", "").replace("γ", "gamma").replace("σ", "sigma")
    folder = words.replace(",", "").replace(":", "").replace("=", "").replace(" ", "_")
    return Federation(replace(config, out=options.out / "federations" / folder))


def finished(out: Path) -> list[Federation]:
    """Every finished federation in `out`, whichever call it came from."""
    found = []
    for file in (out / "federations").glob("*/run.json"):
        described = json.loads(file.read_text(encoding="utf-8"))
        if described["finished"]:
            config = RunConfig.from_json(json.dumps(described["config"]))
            found.append(Federation(replace(config, out=file.parent)))
    return sorted(found, key=Federation.order)


def _training(config: RunConfig) -> tuple:
    """What all federations of one table have in common."""
    federation = replace(config.federation, partition="", evaluate_every=1)
    data = replace(config.data, data_path=None)
    return federation, config.local, data, replace(config.model, model=split_name(config.model.model)[0]), config.start


def _base(o: Options, partition: str, group: int, seed: int) -> RunConfig:
    shipped = shipped_weights(o.model, o.weights)  # by path: each defence's model starts from the plain one's weights
    weights = o.weights if shipped is None or o.start is not None else str(shipped)
    audited = sorted({1, *(round(o.rounds * point / o.audit_points) for point in range(1, o.audit_points + 1))})
    return RunConfig(
        federation=FederationConfig(
            clients=o.clients,
            rounds=o.rounds,
            partition=partition,
            learning_rate=o.learning_rate,
            evaluate_every=max(1, o.rounds // o.audit_points),
        ),
        model=ModelConfig(model=o.model, weights=weights, image_size=o.image_size),
        start=EncoderConfig(o.start),
        data=DataConfig(data=o.data, data_path=o.data_path, test_limit=o.test_images),
        audit=AuditConfig(
            attacks=o.runnable(),
            budget=o.budget,
            audit_clients=tuple(range(min(o.audit_clients, o.clients // max(group, 1)))),
            secure_aggregation=group,
            audit_rounds=tuple(audited),
            at_most=o.limits(),
            steps=o.steps if any(name == AUTO or searches(name) for name in o.runnable()) else (),
            grants=o.grants,
            lpips_net=o.lpips_net,
            lpips_weights=o.lpips_weights,
        ),
        device=o.device,
        threads=o.threads,
        seed=seed,
        resume=True,  # whether the whole folder may be gone on with is decided before
    )


def check(options: Options) -> None:
    """Raise `UsageError` for a federation that cannot be run, and for a folder that holds others.

    What differs between federations can be wrong in each; the data are loaded once.
    """
    done, base = finished(options.out), _base(options, "iid", 0, 0)
    if any(_training(one.config) != _training(with_recipe(base, one.recipe)) for one in done):
        raise UsageError(
            f"{options.out} holds federations with another model, data, clients or rounds; pass another --out"
        )
    if any((read_encoder(one.config.out) is None) == options.probes for one in done):
        raise UsageError(
            f"{options.out} holds federations whose accuracy is {'not ' * options.probes}that of a linear probe; pass "
            "another --out"
        )
    for one in federations(options):
        one.config.validate()
    for one in {one.partition: one for one in federations(options)}.values():
        check_before_start(one.config)


def run(options: Options, console: Console) -> None:
    """Train and attack what is missing; an interrupted run leaves table and figure of what is finished.

    Raises:
        UsageError: options that cannot be met.
        Failure: a client failed.
    """
    check(options)
    every = list(federations(options))
    try:
        for number, one in enumerate(every, start=1):
            title = f"federation {number} of {len(every)}: {one.title}"
            run_federation(one.config, title, console, partial(_measure, probes=options.probes))
    except ClientFailure as error:
        raise Failure(f"{error}\n{options.resume_hint()}") from error
    finally:
        done = finished(options.out)
        if done:
            collect(done, options)
    table = pd.read_csv(options.out / "table.csv")
    console.print(table[SHOWN].round(3).to_string(index=False), highlight=False)
    console.print(f"table and figure: {options.out}", soft_wrap=True, highlight=False)


def _measure(config: RunConfig, folder: RunFolder, probes: bool) -> None:
    """What is measured of a federation beside its rows."""
    measure_ranks(config, folder)
    if probes:
        measure_encoder(config, folder)


def collect(done: Sequence[Federation], options: Options) -> None:
    """Gather rows, rounds and ranks of finished federations, note the call in run.json, and write table and figure."""
    out = options.out
    gather_rows([one.config.out for one in done], out)
    write_whole(out / "rounds.csv", _rounds(done).to_csv(index=False).encode())
    ranks = [_placed(one, own) for one in done if (own := read_ranks(one.config.out)) is not None]
    if ranks:
        write_whole(out / RANKS, pd.concat(ranks).to_csv(index=False).encode())
    titles = sorted(one.title for one in done)
    program = "python benchmarks/federated_tradeoff.py"
    rows = read_rows(out)
    reasons = reasons_not_run([one.config.out for one in done], set(rows["attack"]))
    recipes = {_run_id(one): one.recipe for one in done if one.recipe != PLAIN}
    note_rows(out, program, rows, federations=titles, recipes=recipes, not_run=reasons | options.not_run())
    (OBJECTIVES if options.probes else TRADEOFF).write(out)


def _rounds(done: Sequence[Federation]) -> pd.DataFrame:
    """Accuracy by round: partition, point, seed, round, loss, accuracy, test_images."""
    frames = []
    for one in done:
        own = read_encoder(one.config.out)
        if own is None:
            own = pd.read_csv(one.config.out / "rounds.csv")[["round", "loss", "accuracy"]]
            own["test_images"] = test_images_of(one.config)
        frames.append(_placed(one, own))
    return pd.concat(frames, ignore_index=True)


def _run_id(one: Federation) -> str:
    return json.loads((one.config.out / "run.json").read_text(encoding="utf-8"))["run_id"]


def _placed(one: Federation, own: pd.DataFrame) -> pd.DataFrame:
    """A federation's table with the columns that tell it from others.

    Its point is that of its rows: a defence may set its options by the number of rounds (`dp_sgd` for an epsilon).
    """
    (point,) = placed(load_rows(one.config.out / "rows.jsonl"), {_run_id(one): one.recipe})["point"].unique()
    place = pd.DataFrame({"partition": one.partition, "point": point, "seed": one.config.seed}, index=own.index)
    return place.join(own)
