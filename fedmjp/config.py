"""The options of a run: the only place where a default stands. The command line is made from these dataclasses.

Neither torch nor any attack is imported here: names are checked against registries, and what they name is imported when
a run begins. An option of a defence whose name is taken carries the defence's name (`fedmjp.defenses.options`).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import tyro

from attacks import ATTACKS, UsageError
from attacks.observation import Capability, ThreatModel
from fedmjp.budgets import (
    ALL,
    AUTO,
    EVERY,
    attack_settings,
    build_attack,
    read_budget,
    read_seconds,
    searches,
    spread_evenly,
)
from fedmjp.data.catalog import IMAGES, require_kind
from fedmjp.defenses import DEFENSES, Defense
from fedmjp.defenses.chain import read_defense, split_chain
from fedmjp.defenses.options import defense_options, option_names
from fedmjp.federation_options import FederationConfig, LocalConfig
from fedmjp.model_options import DataConfig, EncoderConfig, ModelConfig
from fedmjp.models import MODELS, split_name
from fedmjp.objectives import Objective, objective_help, read_objective
from fedmjp.settings import describe, from_plain, option_fields, read_value, replace_at
from fedmjp.workers.options import WorkerConfig

if TYPE_CHECKING:
    from fedmjp.entropy import ClientEntropy

DEFENSE_HELP = (
    f"Defences to compare, one federation each on the same data and seed. Choose from: {', '.join(DEFENSES)}; one of "
    "them may be given several times with settings of its own, as NAME:option=value (mjp:gamma=0.1 mjp:gamma=0.9), "
    "and several values of an option in quotes ('withheld:train_only=biases head'); "
    "several act one after the other as a chain, NAME+NAME (mjp:gamma=0.5+noise)."
)
OBJECTIVE_HELP = objective_help()
LARGEST_SEED = 2**63
ATTACKS_HELP = (
    "Attacks on each audited update. auto: all that the threat model grants and that have something to add, the "
    f"fastest first, within the budget; all: every one; or names. Choose from: auto, all, {', '.join(ATTACKS)}."
)


@dataclass(frozen=True)
class AuditConfig:
    """Which updates are attacked, how, and under which threat model."""

    attacks: Annotated[tuple[str, ...], tyro.conf.arg(help=ATTACKS_HELP)] = (AUTO,)
    budget: str = "10s"
    """Time that --attacks auto may plan for each update, on one CPU core (60s, 2m). Estimated, not measured, so that
    the same command runs the same attacks everywhere; what is left out is named in the report."""
    audit_clients: tuple[int, ...] = (0, 1, 2, 3)
    """Ids of the clients whose updates are attacked."""
    audit_rounds: tuple[int, ...] = ()
    """Rounds whose updates are attacked (none given: every round)."""
    secure_aggregation: int = 0
    """Clients of a round of whose updates the server sees the sum alone (0: it sees each one). Groups are formed in the
    order of the clients' ids; --audit-clients then names groups, counted from 0."""
    at_most: tuple[str, ...] = ()
    """Audited updates that slow attacks get, as ATTACK=NUMBER or a NUMBER for all: so many a federation, spread evenly
    over its audited rounds and clients."""
    steps: tuple[str, ...] = ()
    """Steps of the attacks that search, as a NUMBER for all or ATTACK=NUMBER (none given: each attack's own)."""
    attack_options: tuple[str, ...] = ()
    """Settings of attacks, as ATTACK.setting=value (mjp_subspace.prior.strength=20); --steps is short for
    ATTACK.steps=NUMBER."""
    grants: tuple[str, ...] = tuple(sorted(c.value for c in ThreatModel().grants))
    """What the adversary sees beyond an update: model_weights, position_gradient, several_rounds, labels,
    token_gradient, modified_model, auxiliary_data, active_parameters, active_architecture, client_selection (the
    attacked clients take part in every round), client_seed; aggregate_only comes with --secure-aggregation. An attack
    that needs more is refused."""
    lpips_net: Literal["squeeze", "alex", "vgg"] = "squeeze"
    """Backbone of the LPIPS metric."""
    lpips_weights: Path | None = None
    """State dict of lpips.LPIPS (none given: squeeze ships with fedmjp, alex and vgg need a cached backbone)."""

    def named(self) -> tuple[str, ...]:
        """The attacks that were asked for by name."""
        return tuple(name for name in self.attacks if name not in (AUTO, ALL))

    def budget_seconds(self) -> float:
        """--budget in seconds.

        Raises:
            UsageError: no such time.
        """
        return read_seconds(self.budget, "--budget")


@dataclass(frozen=True)
class RunConfig:
    """Train a federation of Vision Transformers, attack its updates, and report what they leak."""

    defense: Annotated[tuple[str, ...], tyro.conf.arg(help=DEFENSE_HELP)] = ("none",)
    objective: Annotated[str, tyro.conf.arg(help=OBJECTIVE_HELP)] = "supervised"
    federation: FederationConfig = field(default_factory=FederationConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    start: EncoderConfig = field(default_factory=EncoderConfig)
    data: DataConfig = field(default_factory=DataConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    options: DefenseOptions = field(default_factory=lambda: DefenseOptions())  # type: ignore[valid-type]
    device: str = "cpu"
    """cpu, cuda, or cuda:INDEX."""
    threads: int = 0
    """Torch threads (0: torch's own choice, fewer while other programs keep cores busy)."""
    seed: int = 0
    """Fixes weights and how the images are dealt out; the server knows it."""
    client_seed: int = 0
    """Fixes, with --seed, what the clients of a simulation draw: order of images, augmentation, masks, noise. No
    message and no attack holds it; on SuperNodes clients draw from entropy of their own."""
    out: Path = Path("runs/simulate")
    """Folder of the results (left at its default, a new folder in it is named after the time)."""
    resume: bool = False
    """Go on with the unfinished run in --out; finished rows are not repeated."""
    computing: WorkerConfig = field(default_factory=WorkerConfig)
    log: Literal["none", "tensorboard"] = "none"
    """tensorboard: accuracy, loss and the PSNR of each attack by round, as event files in OUT/tensorboard
    (pip install 'fedmjp[tensorboard]')."""

    def defence(self, entry: str) -> Defense:
        """The defence of one entry of `defense`, with this run's options and then those of the entry itself.

        Raises:
            UsageError: no such defence, one of another package that cannot be imported, or a setting that does not fit.
        """
        # A defence that was registered after this module has no options on the command line.
        return read_defense(entry, lambda name: getattr(self.options, name, None))

    def chosen_objective(self) -> Objective:
        """What the clients train.

        Raises:
            UsageError: see `read_objective`.
        """
        return read_objective(self.objective)

    def sampled(self) -> int:
        """Clients per round."""
        return self.federation.clients_per_round or self.federation.clients

    def validate(self) -> None:
        """Check every option against the others; names and numbers first, before an attack is imported.

        Raises:
            UsageError: one line that names the option and its choices.
        """
        for entry in self.defense:
            for name, _ in split_chain(entry):
                DEFENSES.check(name)
        if not self.defense or len(set(self.defense)) < len(self.defense):
            raise UsageError(f"--defense takes different entries of: {', '.join(DEFENSES.names())}")
        split_name(self.model.model)
        for name in self.defense:
            self.defence(name).validate()
            self.chosen_objective().check(self.model.model, self.defence(name))
            self.defence(name).check(self.chosen_objective(), self.local.augmentation())
        if self.chosen_objective().per_pixel:
            raise UsageError(f"--objective {self.objective} has no federation here; train it with fedmjp.train")
        if MODELS.get(split_name(self.model.model)[0]).speech:
            raise UsageError(f"--model {self.model.model} has no federation here; train it with fedmjp.train")
        require_kind(self.data.data, IMAGES, "a federation")
        self.start.validate(self.model)
        self.model.side()
        self.federation.validate()
        self.local.validate(self.federation, self.model.model)
        augmentation = self.local.augmentation()
        if augmentation is not None and augmentation.softens and not self.chosen_objective().needs_labels:
            raise UsageError(
                f"--objective {self.objective} has no labels to mix or smooth; pass --augment crop+flip, not "
                f"{self.local.augment}"
            )
        self.computing.check(self.device, self.threads)
        if self.threads < 0 or not 0 <= self.seed < LARGEST_SEED:
            raise UsageError("--threads must not be negative, and --seed must lie between 0 and 2^63 - 1")
        if self.computing.spread and self.federation.engine != "local":
            raise UsageError("--engine ray gives the cores to clients; leave out --workers and --ray")
        self._validate_audited()
        for name in self.audit.named():
            ATTACKS.check(name)
        if self.log == "tensorboard" and find_spec("tensorboard") is None:
            raise UsageError("--log tensorboard needs TensorBoard: pip install 'fedmjp[tensorboard]'")
        self.audit.budget_seconds()
        for option in ("at_most", "steps"):
            read_budget(getattr(self.audit, option), f"--{option.replace('_', '-')}")
        self._validate_attacks()

    def _validate_attacks(self) -> None:
        settings, threat, named = self.attack_settings(), self.threat_model(), self.audit.named()
        if not self.audit.attacks:
            raise UsageError(f"--attacks takes auto, all, or names from: {', '.join(ATTACKS)}")
        if self.audit.steps and len(named) == len(self.audit.attacks) and not any(searches(name) for name in named):
            raise UsageError(f"--steps is for attacks that search, and none of {', '.join(named)} does")
        for name in named:
            build_attack(name, settings.get(name)).require(threat, name)

    def _validate_audited(self) -> None:
        f, count = self.federation, self._audited_updates()
        if not self.audit.audit_clients:
            raise UsageError(f"--audit-clients takes at least one client, from 0 to {count - 1}")
        strange = [c for c in self.audit.audit_clients if not 0 <= c < count]
        if strange and self.audit.audit_clients != AuditConfig().audit_clients:
            size = self.audit.secure_aggregation
            what = f"group of {size} clients" if size else "client"
            raise UsageError(f"--audit-clients {strange[0]} is no {what}; choose from 0 to {count - 1}")
        strange = [r for r in self.audit.audit_rounds if not 1 <= r <= f.rounds]
        if strange:
            raise UsageError(f"--audit-rounds {strange[0]} is no round; choose from 1 to {f.rounds}")
        if len(self.always_asked()) > self.sampled():
            raise UsageError(
                f"--grants client_selection asks the {len(self.always_asked())} attacked clients in every round, which "
                f"has {self.sampled()}: name fewer with --audit-clients, or raise --clients-per-round"
            )

    def always_asked(self) -> range | tuple[int, ...]:
        """Clients that a server which selects them asks in every round: the attacked ones; none without that grant.

        Of sums, all clients up to the last attacked group's, so that every attacked group has the same members.
        """
        if Capability.CLIENT_SELECTION.value not in self.audit.grants:
            return ()
        attacked, size = self._audited(), self.audit.secure_aggregation
        return range((attacked[-1] + 1) * size) if size else tuple(attacked)

    def _audited(self) -> list[int]:
        """--audit-clients without the ones of its default that the run does not have."""
        return sorted(c for c in set(self.audit.audit_clients) if c < self._audited_updates())

    def _audited_updates(self) -> int:
        """Clients, or groups of them in a round; `UsageError` if they do not make groups of --secure-aggregation."""
        size, sampled = self.audit.secure_aggregation, self.sampled()
        if not size:
            if Capability.AGGREGATE_ONLY.value in self.audit.grants:
                raise UsageError("--grants aggregate_only is set by --secure-aggregation NUMBER; pass that instead")
            return self.federation.clients
        if not 2 <= size <= sampled or sampled % size:
            raise UsageError(
                f"--secure-aggregation {size} makes no equal groups of the {sampled} clients of a round; pass a "
                f"divisor of {sampled} from 2 on, or 0 for none"
            )
        if self.federation.local_epochs:
            raise UsageError("--secure-aggregation needs clients of equally many steps: pass --local-steps instead")
        if self.federation.least_share < 1:
            raise UsageError("--secure-aggregation needs every client of a round: leave --least-share at 1")
        if self.chosen_objective().whole_views > 1:
            raise UsageError(f"--secure-aggregation has no sums of several views: --objective {self.objective}")
        if Capability.CLIENT_SEED.value in self.audit.grants:
            raise UsageError("--grants client_seed is of one client's draws: leave out --secure-aggregation")
        return sampled // size

    def attack_settings(self) -> dict[str, dict[str, Any]]:
        """The settings given for attacks, by attack; `build_attack` reads their values.

        Raises:
            UsageError: no such attack, or one that does not run.
        """
        return attack_settings(self.audit.attacks, self.audit.steps, self.audit.attack_options)

    def attacked(self, name: str) -> list[tuple[int, int]]:
        """The (round, client) whose updates the attack (or guess) called `name` gets, in order."""
        a, f = self.audit, self.federation
        rounds = sorted(a.audit_rounds) or range(1, f.rounds + 1)
        clients = self._audited()
        limits = read_budget(a.at_most, "--at-most") if name in ATTACKS else {}
        return spread_evenly([(r, c) for r in rounds for c in clients], limits.get(name, limits.get(EVERY)))

    def threat_model(self) -> ThreatModel:
        """What the adversary is granted."""
        grants = set(self.audit.grants)
        if self.model.block == "april":  # the server that hands out such a block chose the architecture
            grants.add(Capability.MODIFIED_MODEL.value)
        if self.audit.secure_aggregation:
            grants.add(Capability.AGGREGATE_ONLY.value)
        return ThreatModel.parse(sorted(grants))

    def to_json(self) -> str:
        """Canonical JSON of all that the run reads: the same for equal runs, whichever other defences are installed."""
        values = dataclasses.asdict(self)
        names = dict.fromkeys(name for entry in self.defense for name, _ in split_chain(entry))
        values["options"] = {name: values["options"][name] for name in names if name in values["options"]}
        return json.dumps(values, default=str, sort_keys=True)

    def order(self) -> str:
        """`to_json` for the clients: without what the server of a federation does not know or need not tell."""
        values = json.loads(self.to_json())
        return json.dumps({name: v for name, v in values.items() if name not in NOT_ORDERED}, sort_keys=True)

    def client_entropy(self) -> ClientEntropy:
        """What the clients of a simulation of this run draw from."""
        from fedmjp.entropy import ClientEntropy

        return ClientEntropy.simulated(self.seed, self.client_seed)

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        """Inverse of `to_json`; options of defences that do not run have their defaults.

        Raises:
            UsageError: an option that is unknown here, such as those of a defence that is not installed.
        """
        return from_plain(cls, json.loads(text))


# What the server's orders leave out: the seed of what clients draw, and how the server itself runs.
NOT_ORDERED = ("client_seed", "out", "resume", "log", "computing")
# A group of options a defence; only now are the names known that a run's other options take.
DefenseOptions = defense_options(option_names(RunConfig))


def from_flat(options: dict[str, Any], base: RunConfig | None = None) -> RunConfig:
    """A configuration from flat option names, as `flwr run --run-config` passes them (`gamma=0.5 clients=4`).

    Names are those of the command line, with underscores or dashes (`batch_size`, `toy.gamma`). A string is read as the
    option's type; tuples are written with commas (`defense="none,mjp"`), and "" stands for none given.

    Args:
        base: what is not named is taken from here, by default from the defaults.

    Raises:
        UsageError: no such option, or a value that is not of its type.
    """
    config, places = base or RunConfig(), option_places()
    for key, value in options.items():
        name = key.replace("-", "_")
        if name not in places:
            raise UsageError(f"unknown option {key!r}; choose from: {', '.join(sorted(places))}")
        path, kind = places[name]
        text = value if isinstance(value, str) else json.dumps(value)
        try:
            config = replace_at(config, path, read_value(text, kind))
        except ValueError:
            raise UsageError(f"option {key} takes {describe(kind)}, not {value!r}") from None
    return config


@cache
def option_places() -> dict[str, tuple[list[str], Any]]:
    """Flat name of every option -> (the fields that lead to it from a `RunConfig`, its type); read only."""
    found = option_fields(RunConfig, leave_out="options")
    groups = {defence: get_type_hints(group) for defence, group in get_type_hints(DefenseOptions).items()}
    for name, (defence, option) in DefenseOptions.places.items():
        found[name] = ["options", defence, option], groups[defence][option]
    return found
