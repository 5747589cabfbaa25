"""Options of the trade-off between accuracy and leakage."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from attacks import ATTACKS, ThreatModel, UsageError
from attacks.observation import SUPERVISED
from experiments.client_recipes import PLAIN, RECIPES, check_recipes
from experiments.scaffold import DEFENSE_NAMES, AttackOptions, check_names, check_positive, sweep
from fedmjp.budgets import ALL, AUTO, read_seconds
from fedmjp.config import ATTACKS_HELP, AuditConfig, DefenseOptions
from fedmjp.defenses import DEFENSES
from fedmjp.defenses.chain import read_defense, split_chain
from fedmjp.objectives import read_objective
from fedmjp.settings import split_entry

NOPE = "nope"  # a federation of the model without position embeddings, beside the registered defences
# Closed forms take milliseconds an update and get them all; `unmix` and `patch_set` take seconds, as searches do.
SLOW = {"unmix": 16, "patch_set": 16, "unmix_rounds": 8, "batch_rounds": 8, "breaching_april": 8}
CLIP_NORM = 30.0
ATTACKS_USED = (
    f"{ATTACKS_HELP} The default is all, which holds more than auto: --steps and --at-most limit the time of the slow "
    "ones (5 minutes a federation on one core), and a table beside all defences wants the same attacks on each."
)


def _strong_clipping() -> Any:
    return replace(DefenseOptions(), noise=DEFENSES.get("noise")(clip_norm=CLIP_NORM))


@dataclass(frozen=True)
class Options(AttackOptions):
    """What does a defence cost in accuracy, and what does it buy in privacy?

    Trains a federation for every partition of the data and every defence (none; `nope`, the model without position
    embeddings; mjp at each gamma; any other registered defence where asked for) and lets the server run every
    registered attack on the updates that train it. Draws the accuracy-privacy plane: final accuracy against the PSNR of
    the strongest attack, and against the share of originals that are the nearest of 1,000 images to what that attack
    returned. What the plane can tell and what it cannot stands under the table that it writes.

        python benchmarks/federated_tradeoff.py --data cifar10 --data-path DIR
        python benchmarks/federated_tradeoff.py --data cifar10 --data-path DIR --defenses noise spp --resume
        python benchmarks/federated_tradeoff.py --data photos --clients 4 --rounds 2 --audit-points 2 --attacks april
        python benchmarks/federated_tradeoff.py --weights auto --defenses none quantise:quantise_format=sign --out DIR
        python benchmarks/federated_tradeoff.py --weights auto --defenses none --recipes flip "batch of 8" --out DIR
        python benchmarks/federated_tradeoff.py --from MODEL.safetensors --defenses none mjp noise --out DIR
        python benchmarks/federated_tradeoff.py --model vit_ti --weights FILE --image-size 160 --data imagenet --out DIR
        python benchmarks/federated_tradeoff.py --objectives supervised mp3 mst:local_crops=0 --defenses none --out DIR

    Every federation has a folder of its own in OUT/federations and is taken up where it stopped (--resume). Table and
    figure show all that are finished, from this call and from earlier ones, which may have attacked more or less.
    Writes rows.jsonl.gz, rounds.csv, table.csv, table.md, tradeoff.png and run.json to --out.
    """

    model: str = "vit_mini_32"
    """A plain ViT, without _nope or _mjp."""
    weights: str = "random"
    """Where every federation starts: random, a checkpoint's path, auto (the shipped checkpoint of --model for all
    defences alike, else random), or long (that of a longer training)."""
    start: Annotated[Path | None, tyro.conf.arg(name="from", metavar="CHECKPOINT")] = None
    """Every federation fine-tunes the encoder of this checkpoint under a new classifier, as `python -m fedmjp.simulate
    --from` does; instead of --weights."""
    image_size: int | None = None
    """Pixels of a side; the position embedding is resampled (None: the model's own)."""
    data: str = "cifar10"
    """cifar10, cifar100, tiny-imagenet, imagenet, photos (embedded), or folder:PATH."""
    data_path: Path | None = None
    """Local copy of the data set."""
    test_images: int = 1000
    """Most test images behind an accuracy."""
    clients: int = 32
    """Clients; each sends one update a round, the gradient of one image unless a recipe says otherwise."""
    recipes: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            help=f"How the clients train, each under every defence: {', '.join(RECIPES)}. Attacks "
            "are scored against the images that the client fed, augmented."
        ),
    ] = (PLAIN,)
    secure_aggregation: tuple[int, ...] = (0,)
    """Clients of whose updates the server sees the sum alone (0: every update by itself); each of these under every
    defence. Groups are then what --audit-clients counts."""
    rounds: int = 60
    """Rounds of training."""
    audit_points: Annotated[int, tyro.conf.arg(aliases=("--looks",))] = 4
    """Evenly spaced rounds, the last among them, after which the model is evaluated and at which updates are attacked;
    the first round is attacked too."""
    audit_clients: int = 8
    """Clients whose updates are attacked at each of these rounds."""
    learning_rate: float = 0.03
    """Of the server's step on the mean gradient."""
    partitions: tuple[str, ...] = ("iid", "dirichlet:0.3")
    """iid, or dirichlet:ALPHA."""
    defenses: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            help="nope, the model without position embeddings, and registered defences: those with the option gamma at "
            "each of --gammas, those with noise_multiplier at each of --noise-multipliers, others once, as their "
            "options say. NAME:option=value and chains (NAME+NAME) run once as they are written; "
            f"{DEFENSE_NAMES}.",
            aliases=("--defense",),
        ),
    ] = ("none", NOPE, "mjp")
    objectives: tuple[str, ...] = (SUPERVISED,)
    """What the clients train, as `python -m fedmjp.simulate --objective` takes it; each under every defence, but nope
    under supervised alone. With any other than supervised, every accuracy of the table is that of a linear probe of the
    encoder."""
    gammas: tuple[float, ...] = (0.1, 0.5, 0.9)
    """Masking ratios of defences with the option gamma."""
    noise_multipliers: tuple[float, ...] = (1e-4, 1e-3)
    """Standard deviations of the noise on an update, in units of --clip-norm, of defences with that option."""
    options: DefenseOptions = field(default_factory=_strong_clipping)  # type: ignore[valid-type]
    attacks: Annotated[tuple[str, ...], tyro.conf.arg(help=ATTACKS_USED)] = (ALL,)
    budget: str = "10s"
    """Time that --attacks auto may plan for each audited update, on one CPU core (60s, 2m)."""
    steps: tuple[str, ...] = ("15", "breaching_dlg=2")
    """Steps of the attacks that search, as NUMBER for all or ATTACK=NUMBER."""
    at_most: tuple[str, ...] = ()
    """Audited updates a federation that slow attacks get, as ATTACK=NUMBER or a NUMBER for all: spread evenly over
    rounds and clients (none given: 16 for unmix and patch_set, 8 for unmix_rounds, batch_rounds and breaching_april, 1
    for the other attacks of the breaching package, 2 for other searches)."""
    grants: tuple[str, ...] = AuditConfig().grants
    """What the server sees beyond an update; attacks that need more are left out, and the table says so."""
    seeds: tuple[int, ...] = (0,)
    """One federation of each kind for every seed."""
    out: Path = Path("runs/federated_tradeoff")
    """Folder of federations, table and figure (the committed ones stand in results/federated_tradeoff)."""
    resume: bool = False
    """Go on in a folder that holds federations already; finished ones and finished rows are not repeated."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is written."""
        from fedmjp.models import MODELS, split_name

        check_names(ATTACKS, [name for name in self.attacks if name not in (AUTO, ALL)])
        read_seconds(self.budget, "--budget")
        check_positive(self, "audit_points", "audit_clients", "test_images")
        if self.audit_points > self.rounds:
            raise UsageError(f"--audit-points {self.audit_points} needs as many --rounds")
        for option in ("partitions", "defenses", "recipes", "secure_aggregation", "seeds", "attacks"):
            given = getattr(self, option)
            if not given or len(set(given)) < len(given):
                raise UsageError(f"--{option.replace('_', '-')} takes one or more different entries")
        for name in self.defenses:
            self.strengths(name)
        check_recipes(self.recipes)
        names = [split_entry(entry, "--objectives")[0] for entry in self.entries()]
        if not names or len(set(names)) < len(names):
            raise UsageError("--objectives takes one or more, each once; pass another --out for other options of one")
        for entry in self.entries():
            read_objective(entry)
        if not any(self.strengths(name) for name in self.defenses):
            raise UsageError("no federation is asked for; --defenses mjp needs --gammas, noise --noise-multipliers")
        if not self.runnable():
            raise UsageError("none of --attacks can run: " + "; ".join(self.not_run().values()))
        base, variant = split_name(self.model)
        if variant or MODELS.get(base).vit is None:
            raise UsageError(f"--model takes a plain ViT without suffix, not {self.model!r}: its variants are compared")
        if self.out.exists() and any(self.out.iterdir()) and not self.resume:
            raise UsageError(f"{self.out} holds federations already; pass --resume to go on, or another --out")

    def strengths(self, name: str) -> list:
        """The defence of an entry of --defenses, once for each strength that is asked for; `nope` is no defence.

        Raises:
            UsageError: no such defence, or a strength given where a list of strengths is swept.
        """
        if name != NOPE and split_chain(name) != [(name, {})]:
            return [read_defense(name, lambda part: getattr(self.options, part, None))]
        if name != NOPE:
            DEFENSES.get(name)
        defense = getattr(self.options, "none" if name == NOPE else name)
        for option in ("gamma", "noise_multiplier"):
            if hasattr(defense, option):
                return sweep(defense, option, getattr(self, f"{option}s"))
        return [defense]

    def entries(self) -> tuple[str, ...]:
        """`objectives`, whose options were split at commas as all lists of a command line are, put together again."""
        found: list[str] = []
        for part in self.objectives:
            if found and "=" in part and ":" not in part:
                found[-1] += f",{part}"
            else:
                found.append(part)
        return tuple(found)

    @property
    def probes(self) -> bool:
        """Whether accuracies are those of a linear probe."""
        return self.entries() != (SUPERVISED,)

    def names(self) -> tuple[str, ...]:
        """The attacks that are asked for, all of them by name; auto stays, because the updates decide what it holds."""
        return tuple(dict.fromkeys((*self.attacks, *ATTACKS))) if ALL in self.attacks else self.attacks

    def not_run(self) -> dict[str, str]:
        """Every registered attack that is not run, and why, as far as the options decide it."""
        threat, found = ThreatModel.parse(self.grants), {}
        for name in ATTACKS:
            try:
                ATTACKS.get(name)().require(threat, name)
            except UsageError as error:
                found[name] = f"not run: {error}"
            if name not in self.names() and AUTO not in self.names():
                found[name] = "not run: not among --attacks"
        return found

    def runnable(self) -> tuple[str, ...]:
        """The attacks that are asked for and can be run under this threat model, and auto."""
        left_out = self.not_run()
        return tuple(name for name in self.names() if name not in left_out and name != ALL)

    def limits(self) -> tuple[str, ...]:
        """`at_most`, or what it stands for where it is empty."""
        from fedmjp.budgets import searches

        searching = {name: 1 if name.startswith("breaching_") else 2 for name in ATTACKS if searches(name)}
        return self.at_most or tuple(f"{name}={count}" for name, count in (SLOW | searching).items())
