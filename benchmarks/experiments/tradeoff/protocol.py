"""What does a defence cost in accuracy, and what does it buy in privacy?  python benchmarks/federated_tradeoff.py

Trains a federation for every partition of the data and every defence (none; `nope`, the model without position
embeddings; mjp at each gamma; noise where asked for) and lets the server run every registered attack on the updates
that train it. Ends in the accuracy-privacy plane: final accuracy against the strongest attack's PSNR.

    python benchmarks/federated_tradeoff.py --data cifar10 --data-path DIR
    python benchmarks/federated_tradeoff.py --data cifar10 --data-path DIR --defenses noise --resume   # a yardstick
    python benchmarks/federated_tradeoff.py --data photos --clients 4 --rounds 2 --looks 2 --attacks patch_embedding

*One federation, not two.* Learning wants large batches, closed forms invert batches of one. Both hold at once where
many clients send the gradient of one image each (FedSGD): every update that moves the model is one that is attacked, at
the weights at which it was made, and `--clients` is the batch of a step. Plain descent and its rate were chosen on
undefended runs of 150 rounds with 32 clients (500 test images, one seed): 28 % at rate 0.03, 19 % at 0.1, 27 % with
momentum 0.9, 26 to 29 % with Adam. All defences train at that one rate, none is tuned.

*What the plane can tell.* What each defence costs over the first rounds of training, from the same weights, images
and order of clients; and what an honest-but-curious server with these attacks sees of those rounds. Attacks over
several rounds get every earlier update of their client; at the defaults no image comes twice in those.

*What it cannot tell.* The models are barely trained: what a defence costs at 90 % accuracy, and how late rounds leak,
is not shown. The interval of the accuracy is over test images; another seed may move it by as much. At 32 pixels in
patches of 4 a patch has 48 values and there are 64 patches; attacks that need it the other way round say so. Searches
run for few steps (`--steps`) on few updates (`--at-most`), where papers take thousands: their failure proves nothing.

Every federation has a folder of its own in OUT/federations and is taken up where it stopped (--resume). Table and
figure show all that are finished, from this call and from earlier ones, which may have attacked more or less. Writes
rows.jsonl.gz, rounds.csv, table.csv, table.md, tradeoff.png and run.json to --out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import pandas as pd
import tyro
from rich.console import Console

from attacks import ATTACKS, ThreatModel, UsageError
from experiments.tradeoff.table import tradeoff_table, write_tradeoff
from fedmjp.audited_federation import check_before_start, run_experiment
from fedmjp.budgets import searches
from fedmjp.cli import EXIT_FAILURE, guarded, parse, split_commas, terminal
from fedmjp.config import AuditConfig, DataConfig, FederationConfig, ModelConfig, RunConfig
from fedmjp.federation import ClientFailure
from fedmjp.models import MODELS, split_name
from fedmjp.models.weights import SHIPPED
from fedmjp.progress import RunProgress
from fedmjp.records.rows import pack_rows
from fedmjp.records.run_folder import Workspace, holds_finished, test_images_of
from fedmjp.records.run_record import note_run
from fedmjp.report import load_rows

NOTES = "\n\n".join(part for part in __doc__.split("\n\n") if part.startswith("*"))  # stand under the table
PROGRAM = "python benchmarks/federated_tradeoff.py"
SHOWN = ["partition", "point", "attack", "psnr_mean", "psnr_low", "psnr_high", "gain", "accuracy", "strongest"]
# Closed forms take milliseconds an update and get them all; a search takes seconds, `unmix` half a minute.
SLOW = {"unmix": 4, "unmix_rounds": 8, "batch_rounds": 8, "breaching_april": 8}
SEARCHES = {name: 1 if name.startswith("breaching_") else 2 for name in ATTACKS if searches(name)}


@dataclass(frozen=True)
class Options:
    """Accuracy and leakage of federations under several defences."""

    model: str = "vit_mini_32"
    """A plain ViT, without _nope or _mjp."""
    weights: str = "random"
    """Where every federation starts: random, a checkpoint's path, or auto (the shipped checkpoint of --model for all
    defences alike, else random)."""
    data: str = "cifar10"
    """cifar10, cifar100, tiny-imagenet, imagenet, photos (embedded), or folder:PATH."""
    data_path: Path | None = None
    """Local copy of the data set."""
    test_images: int = 1000
    """Most test images behind an accuracy."""
    clients: int = 32
    """Clients; each sends the gradient of one image a round."""
    rounds: int = 60
    """Rounds of training."""
    looks: int = 4
    """Evenly spaced rounds, the last among them, after which the model is evaluated and at which updates are attacked;
    the first round is attacked too."""
    audit_clients: int = 8
    """Clients whose updates are attacked at each look."""
    learning_rate: float = 0.03
    """Of the server's step on the mean gradient."""
    partitions: tuple[str, ...] = ("iid", "dirichlet:0.3")
    """iid, or dirichlet:ALPHA."""
    defenses: tuple[Literal["none", "nope", "mjp", "noise"], ...] = ("none", "nope", "mjp")
    """none; nope, the model without position embeddings; mjp at each of --gammas; noise at each of
    --noise-multipliers."""
    gammas: tuple[float, ...] = (0.1, 0.5, 0.9)
    """Masking ratios of MJP."""
    noise_multipliers: tuple[float, ...] = (1e-4, 1e-3)
    """Clipping with Gaussian noise as a yardstick: its standard deviations, in units of --clip-norm."""
    clip_norm: float = 30.0
    """Largest norm of an update under noise; gradients of a fresh vit_mini_32 have about 29."""
    attacks: Annotated[tuple[str, ...], tyro.conf.arg(help=f"Attacks, from: {', '.join(ATTACKS)}.")] = tuple(ATTACKS)
    steps: tuple[str, ...] = ("15", "breaching_dlg=2")
    """Steps of the attacks that search, as NUMBER for all or ATTACK=NUMBER."""
    at_most: tuple[str, ...] = tuple(f"{name}={count}" for name, count in (SLOW | SEARCHES).items())
    """Audited updates a federation that slow attacks get, as ATTACK=NUMBER: spread evenly over rounds and clients."""
    grants: tuple[str, ...] = AuditConfig().grants
    """What the server sees beyond an update; attacks that need more are left out and told."""
    seeds: tuple[int, ...] = (0,)
    """One federation of each kind for every seed."""
    lpips_weights: Path | None = None
    """State dict of lpips.LPIPS(net="squeeze"); without it the column stays empty."""
    device: str = "cpu"
    """cpu, cuda, or cuda:INDEX."""
    threads: int = 0
    """Torch threads (0: torch's own choice)."""
    out: Path = Path("runs/federated_tradeoff")
    """Folder of federations, table and figure (the committed ones stand in results/federated_tradeoff)."""
    resume: bool = False
    """Go on in a folder that holds federations already; finished ones and finished rows are not repeated."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is written."""
        base, variant = split_name(self.model)
        if variant or MODELS.get(base).vit is None:
            raise UsageError(f"--model takes a plain ViT without suffix, not {self.model!r}: its variants are compared")
        for option in ("looks", "audit_clients", "test_images"):
            if getattr(self, option) < 1:
                raise UsageError(f"--{option.replace('_', '-')} must be at least 1, not {getattr(self, option)}")
        if self.looks > self.rounds:
            raise UsageError(f"--looks {self.looks} needs as many --rounds")
        for option in ("partitions", "defenses", "seeds", "attacks"):
            given = getattr(self, option)
            if not given or len(set(given)) < len(given):
                raise UsageError(f"--{option} takes one or more different entries")
        for name in self.attacks:
            ATTACKS.get(name)
        if not self.runnable():
            raise UsageError("none of --attacks can run: " + "; ".join(self.reasons().values()))
        if self.out.exists() and any(self.out.iterdir()) and not self.resume:
            raise UsageError(f"{self.out} holds federations already; pass --resume to go on, or another --out")
        if any(_training(one.config) != _training(_base(self, "iid", 0)) for one in finished(self.out)):
            raise UsageError(
                f"{self.out} holds federations with another model, data, clients or rounds; pass another --out"
            )
        if not list(federations(self)):
            raise UsageError("no federation is asked for; --defenses mjp needs --gammas, noise --noise-multipliers")
        # What differs between federations can be wrong in each; the data are loaded once.
        for one in federations(self):
            one.config.validate()
        for one in {one.partition: one for one in federations(self)}.values():
            check_before_start(one.config)

    def reasons(self) -> dict[str, str]:
        """Every registered attack that is not run, and why."""
        threat, found = ThreatModel.parse(self.grants), {}
        for name in ATTACKS:
            try:
                ATTACKS.get(name)().require(threat, name)
            except UsageError as error:
                found[name] = f"not run: {error}"
            if name not in self.attacks:
                found[name] = "not run: not among --attacks"
        return found

    def runnable(self) -> tuple[str, ...]:
        """The attacks that are asked for and can be run under this threat model."""
        return tuple(name for name in self.attacks if name not in self.reasons())


@dataclass(frozen=True)
class Federation:
    """One federation of the plane."""

    config: RunConfig

    @property
    def partition(self) -> str:
        """How its data were dealt out."""
        return self.config.federation.partition

    @property
    def point(self) -> str:
        """Its defence with its strength, in words."""
        name, options = self.config.defense[0], self.config.options
        if name == "none":
            return "nope" if split_name(self.config.model.model)[1] == "_nope" else "none"
        return f"mjp, γ = {options.mjp.gamma:g}" if name == "mjp" else f"noise, σ = {options.noise.noise_multiplier:g}"

    @property
    def title(self) -> str:
        """For a line of progress."""
        return f"{self.partition}, {self.point}, seed {self.config.seed}"

    def order(self) -> tuple:
        """Where it stands in table and figure."""
        kinds = ["none", "nope", "mjp", "noise"]
        strength = float(self.point.rpartition("= ")[2]) if "=" in self.point else 0.0
        return (
            self.partition != "iid",
            self.partition,
            kinds.index(self.point.split(",")[0]),
            strength,
            self.config.seed,
        )


def federations(options: Options) -> Iterator[Federation]:
    """Every federation that is asked for, in the order in which they run: all defences on one partition first."""
    o = options
    for seed in o.seeds:
        for partition in o.partitions:
            base = _base(o, partition, seed)
            noise = partial(_defended, base, "noise", clip_norm=o.clip_norm)
            configs = {
                "none": [base],
                "nope": [replace(base, model=replace(base.model, model=f"{o.model}_nope"))],
                "mjp": [_defended(base, "mjp", gamma=gamma) for gamma in o.gammas],
                "noise": [noise(noise_multiplier=sigma) for sigma in o.noise_multipliers],
            }
            for one in (Federation(config) for name in o.defenses for config in configs[name]):
                words = one.title.replace(" = ", "").replace("γ", "gamma").replace("σ", "sigma")
                folder = words.replace(",", "").replace(":", "").replace(" ", "_")
                yield Federation(replace(one.config, out=o.out / "federations" / folder))


def finished(out: Path) -> list[Federation]:
    """Every finished federation in `out`, whichever call it came from."""
    found = []
    for file in (out / "federations").glob("*/run.json"):
        told = json.loads(file.read_text(encoding="utf-8"))
        if told["finished"]:
            config = RunConfig.from_json(json.dumps(told["config"]))
            found.append(Federation(replace(config, out=file.parent)))
    return sorted(found, key=Federation.order)


def _training(config: RunConfig) -> tuple:
    """What all federations of a plane have in common."""
    federation = replace(config.federation, partition="", evaluate_every=1)
    return federation, replace(config.data, data_path=None), split_name(config.model.model)[0], config.model.weights


def _base(o: Options, partition: str, seed: int) -> RunConfig:
    shipped = SHIPPED / f"{o.model}.safetensors"
    weights = (str(shipped) if shipped.exists() else "random") if o.weights == "auto" else o.weights
    looks = sorted({1, *(round(o.rounds * (look + 1) / o.looks) for look in range(o.looks))})
    attacks = o.runnable()
    return RunConfig(
        federation=FederationConfig(
            clients=o.clients,
            rounds=o.rounds,
            partition=partition,
            learning_rate=o.learning_rate,
            evaluate_every=max(1, o.rounds // o.looks),
        ),
        model=ModelConfig(model=o.model, weights=weights),
        data=DataConfig(data=o.data, data_path=o.data_path, test_limit=o.test_images),
        audit=AuditConfig(
            attacks=attacks,
            audit_clients=tuple(range(min(o.audit_clients, o.clients))),
            audit_rounds=tuple(looks),
            at_most=o.at_most,
            steps=o.steps,
            grants=o.grants,
            lpips_weights=o.lpips_weights,
        ),
        device=o.device,
        threads=o.threads,
        seed=seed,
        resume=True,  # whether the whole folder may be gone on with is decided before
    )


def _defended(config: RunConfig, name: str, **parameters: float) -> RunConfig:
    defence = replace(config.defence(name), **parameters)
    return replace(config, defense=(name,), options=replace(config.options, **{name: defence}))


class Run:
    """One call of the benchmark."""

    def __init__(self, options: Options, console: Console) -> None:
        options.validate()
        self.options, self.console = options, console

    def __call__(self) -> None:
        """Train and attack what is missing; an interrupted run leaves table and figure of what is finished."""
        every = list(federations(self.options))
        try:
            for number, one in enumerate(every, start=1):
                self.train(one, f"federation {number} of {len(every)}: {one.title}")
        finally:
            done = finished(self.options.out)
            table = self.report(done) if done else None
        self.console.print(table[SHOWN].round(3).to_string(index=False), highlight=False)
        self.console.print(f"table and figure: {self.options.out}", soft_wrap=True, highlight=False)

    def train(self, one: Federation, title: str) -> None:
        """Run or take up one federation, unless it is finished."""
        if holds_finished(one.config):
            self.console.print(f"{title}: finished before", highlight=False)
            return
        self.console.print(title, style="bold", highlight=False)
        workspace = Workspace(one.config)
        run_experiment(one.config, workspace, RunProgress(self.console))
        workspace.finish()

    def report(self, done: Sequence[Federation]) -> pd.DataFrame:
        """Write rows, rounds, table, figure and run.json of these federations."""
        out, rows, rounds = self.options.out, _rows(done), _rounds(done)
        table = tradeoff_table(rows, rounds, self.options.reasons())
        write_tradeoff(table, rows, rounds, NOTES, out)
        rounds.to_csv(out / "rounds.csv", index=False)
        with (out / "rows.jsonl").open("wb") as file:
            for one in done:
                file.write((one.config.out / "rows.jsonl").read_bytes())
        pack_rows(out / "rows.jsonl")
        note_run(out, PROGRAM, rows, federations=[one.title for one in done])
        return table


def _rows(done: Sequence[Federation]) -> pd.DataFrame:
    """The rows of these federations, with their partition and point."""
    frames = [load_rows(o.config.out / "rows.jsonl").assign(partition=o.partition, point=o.point) for o in done]
    return pd.concat(frames, ignore_index=True)


def _rounds(done: Sequence[Federation]) -> pd.DataFrame:
    """Accuracy by round: partition, point, seed, round, loss, accuracy, test_images."""
    frames = []
    for one in done:
        own = pd.read_csv(one.config.out / "rounds.csv")[["round", "loss", "accuracy"]]
        place = pd.DataFrame({"partition": one.partition, "point": one.point, "seed": one.config.seed}, index=own.index)
        frames.append(place.join(own).assign(test_images=test_images_of(one.config)))
    return pd.concat(frames, ignore_index=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0, 1 for a failed client, 2 for a mistake of usage, 130 for an interrupt."""
    options = split_commas(parse(Options, PROGRAM, __doc__, arguments))
    hint = f"finished rows are in {options.out}; go on with --resume --out {options.out}"
    try:
        return guarded(lambda: Run(options, terminal())(), lambda: hint)
    except ClientFailure as error:
        print(f"error: {error}\n{hint}", file=sys.stderr)
        return EXIT_FAILURE


if __name__ == "__main__":
    sys.exit(main())
