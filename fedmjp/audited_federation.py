"""One run: a federation for each defence, its updates audited, every finished row on disk at once.

The way of a datum: client batch -> defence on the input -> loss -> gradient -> defence on the update -> Flower message
-> the server's tap -> Observation -> attack -> Reconstruction -> matched with the original -> scores -> row. The report
is rendered from the rows alone.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from attacks import ATTACKS, Capability, Observation, has_tokenizer
from attacks.active.base import SendContext, Sending
from attacks.findings import Finding
from attacks.fingerprints import repair, repaired
from fedmjp.audit.aggregate import Aggregation, SeenUpdate, SingleUpdate, sum_in_words
from fedmjp.audit.drawn import drawn_by
from fedmjp.audit.guesses import SINGLE
from fedmjp.audit.harness import Scored, scorer
from fedmjp.audit.memory import Memory
from fedmjp.audit.observe import SentModels, observe_update, undo_adam
from fedmjp.audit.originals import Originals
from fedmjp.audit.suite import Suite, active_attack, select_attacks
from fedmjp.audit.update_job import UpdateJob, run_job
from fedmjp.before_start import check_resumable
from fedmjp.budgets import build_attack
from fedmjp.client import Batch, ClientTask, shared_task
from fedmjp.config import RunConfig
from fedmjp.federation import ENGINES, run_rounds
from fedmjp.metrics import load_lpips
from fedmjp.progress import RunProgress
from fedmjp.records import provenance
from fedmjp.records.failures import LEFT_OUT
from fedmjp.records.rows import BASELINES, RowLog
from fedmjp.records.run_folder import RunFolder, holds_finished
from fedmjp.records.server_state import ServerState
from fedmjp.records.tracking import Tracker, open_tracker
from fedmjp.workers import Lost, in_order

NEVER_CAME = "--at-most left it updates that did not come, or that do not fit it"


def run_experiment(config: RunConfig, folder: RunFolder, progress: RunProgress) -> None:
    """Run every federation of `config` into `folder`, going on where it stopped.

    Raises:
        UsageError: data, weights or device that are not there.
        ClientFailure: a client failed.
    """
    ENGINES.get(config.federation.engine)(
        lambda grid: run_on_grid(grid, config, folder, progress),
        config.federation.clients,
        config.client_entropy(),
        folder.clients,
    )


def run_or_resume(
    config: RunConfig, title: str, console: Console, measure: Callable[[RunConfig, RunFolder], None] | None = None
) -> None:
    """Run or take up the federations of `config` in `config.out`, unless they are finished.

    Args:
        title: for a line of progress.
        measure: called with the trained federations while their last states are still in the folder.

    Raises:
        UsageError, ClientFailure: see `run_experiment`.
        Incomplete: attacks were given up; the folder is not finished.
    """
    if holds_finished(config):
        console.print(f"{title}: finished before", highlight=False)
        return
    console.print(title, style="bold", highlight=False)
    folder = RunFolder(config)
    run_experiment(config, folder, RunProgress(console))
    if measure is not None:
        measure(config, folder)
    folder.require_attacked()
    folder.finish()


def run_on_grid(
    grid: Any, config: RunConfig, folder: RunFolder, progress: RunProgress, *, simulated: bool = True
) -> None:
    """Run every federation of `config` on a given Flower Grid; see `run_experiment`.

    Args:
        simulated: the clients draw from `config.client_entropy`, so that the originals of an update are known. If not,
            they draw from entropy of their own (SuperNodes), and answers are not scored.
    """
    if config.computing.spread:
        torch.set_num_threads(1)  # as the workers compute
    lpips = load_lpips(config.audit.lpips_net, config.audit.lpips_weights, config.device)
    try:
        with folder.open_rows() as rows, closing(open_tracker(config.log, config.out)) as tracker:
            for defense in config.defense:
                task = shared_task(config.order(), defense, config.client_entropy())
                folder.note_task(task, simulated=simulated)
                if simulated:
                    folder.check_images(task)
                FederationAudit(task, defense, folder, rows, progress, tracker, lpips, simulated).run(grid)
    finally:
        shared_task.cache_clear()  # another run of this process starts from weights that nobody has trained


class FederationAudit:
    """One federation under one defence, with its auditor; `simulated` as for `run_on_grid`."""

    def __init__(
        self,
        task: ClientTask,
        defense: str,
        folder: RunFolder,
        rows: RowLog,
        progress: RunProgress,
        tracker: Tracker,
        lpips: Callable | None,
        simulated: bool = True,
    ) -> None:
        self.simulated, self.guesses = simulated, BASELINES if simulated else ()
        self.task, self.defense, self.folder, self.rows, self.progress = task, defense, folder, rows, progress
        self.tracker, self.psnr = tracker, defaultdict(list)  # PSNR of the present round's images by attack
        self.config = task.config
        self.score_images = scorer(task.model.patch_size, lpips)
        self.originals = Originals(task, simulated)
        if self.originals.single:
            progress.say(SINGLE)
        self.threat_model, self.settings = self.config.threat_model(), self.config.attack_settings()
        names = (*BASELINES, *ATTACKS)
        self.attacked = {name: frozenset(self.config.attacked(name)) for name in names}  # (round, client) by name
        active = active_attack(self.config.audit.named(), self.settings)
        self.active = None if active is None else (active[0], active[1].granted(self.threat_model))
        self.memory, self.models = self._memory(), SentModels(task.model.module)
        self.alone = self.active is not None and self.active[1].single_out
        self.aggregation = Aggregation(self.config.audit.secure_aggregation, self.alone)
        self.round_started = time.perf_counter()
        self.expected = 0  # rows up to the present round
        self.workers = folder.config.computing  # not in `task.config`, which is what clients get
        self.waiting: list[UpdateJob] = []  # whose attacks have not run yet

    def _memory(self) -> Memory | None:
        """Where earlier updates are kept, if an attack asks for them and the model has tokens to attack."""
        audit, built = self.config.audit, self.task.model
        attacks = (build_attack(n, self.settings.get(n)).granted(self.threat_model) for n in audit.named())
        named = any(Capability.SEVERAL_ROUNDS in attack.used() for attack in attacks)
        several = (
            named or len(audit.named()) < len(audit.attacks) and Capability.SEVERAL_ROUNDS in self.threat_model.grants
        )
        shape = (3, built.image_size, built.image_size)
        if self.active is not None:
            layers = self.active[1].remembered_layers(built.module.eval(), shape)
            return Memory(self.folder.memory_folder(self.defense), layers)
        if not several or not has_tokenizer(built.module, shape):
            return None
        return Memory(self.folder.memory_folder(self.defense))

    def run(self, grid: Any) -> None:
        """Train and audit from the round after the last finished one.

        Raises:
            UsageError: see `check_resumable`.
        """
        finished, state, self.expected = self.folder.load_state(self.defense)
        self.folder.failures.forget(self.defense, finished)
        self.folder.forget_not_attacked(self.defense, finished)
        rounds = self.config.federation.rounds
        if 0 < finished < rounds:
            kept = bool(self.folder.clients.last_rounds(self.defense, finished))
            check_resumable(self.task, self.defense, finished + 1, kept=kept, simulated=self.simulated)
        if state is not None:
            self.task.load(state.weights)
            self.task.learner.begin(state.kept)
        with self.progress.federation(self.defense, rounds, self.config.sampled(), finished):
            if finished < rounds:
                run_rounds(
                    grid,
                    self.task,
                    self.defense,
                    on_update=self.on_update,
                    on_round=self.on_round,
                    on_failure=self.on_failure,
                    on_send=None if self.active is None else self.on_send,
                    first_round=finished + 1,
                    optimizer=state.optimizer if state else None,
                )
        self.folder.note_expected(self.defense, self.expected)

    def on_send(self, round: int, client: int, state: Mapping[str, Tensor]) -> Sending | None:
        """What an active server sends the clients (or groups) that it attacks; None for the others."""
        (name, attack), (client, place) = self.active, self.aggregation.place_of(round, client)
        if (round, client) not in self.attacked[name]:
            return None
        sent = self.memory.first_sent(client, state) if attack.same_model else dict(state)
        model = self.models(sent)
        # Stands for the update to come: earlier ones are read from disk by its names and shapes.
        like = {parameter: sent[parameter] + 1 for parameter in self.task.parameters}
        present = observe_update(
            self.task,
            self.threat_model,
            model=model,
            round=round,
            client=client,
            sent=sent,
            received=like,
            clients=1 if self.alone else max(self.aggregation.size, 1),
        )
        earlier = self.memory.before(present)
        return attack.sent_to(SendContext(model, present.image_shape, present.mean, present.std, earlier), place)

    def on_update(self, view: SingleUpdate) -> None:
        """Audit one client's update, or that of its group once it is complete, if the run asks for it."""
        seen = self.aggregation.add(view)
        if seen is not None:
            audited = (seen.round, seen.client) in self.attacked[BASELINES[0]]
            if audited or (self.memory is not None and seen.client in self.config.audit.audit_clients):
                self._audit(seen, audited)
            if audited and self.workers.spread:
                return  # it is done once its attacks are
        self.progress.client_done()

    def on_failure(self, number: int, client: int, reason: str) -> None:
        """Note a client whose update is missing from a round."""
        self.folder.failures.note(self.defense, number, client, LEFT_OUT, reason)
        self.progress.client_done()

    def on_round(self, number: int, state: ServerState) -> None:
        """Evaluate the global model, note the round and save the state to resume from."""
        self._attack_waiting()
        f = self.config.federation
        due = number % f.evaluate_every == 0 or number == f.rounds
        if due and not self.folder.has_round(self.defense, number):
            loss, accuracy = self.task.evaluate(state.weights)
            seconds = time.perf_counter() - self.round_started if number else 0.0
            self.folder.append_round(self.defense, number, loss, accuracy, seconds)
            self.progress.round_done(number, loss, accuracy, seconds)
            self._track({"loss": loss, "accuracy": accuracy}, number)
        self._track({f"psnr/{name}": sum(own) / len(own) for name, own in self.psnr.items() if own}, number)
        self.psnr.clear()
        self.rows.sync()
        self.folder.save_state(self.defense, number, state, self.expected)
        self.round_started = time.perf_counter()

    def _track(self, values: Mapping[str, float], number: int) -> None:
        self.tracker.scalars({f"{self.defense}/{name}": value for name, value in values.items()}, number)

    def _wanted(self, view: SeenUpdate, suite: Suite) -> list[str]:
        """The guesses and attacks of the suite that are due on this update and have no rows yet."""
        place = view.round, view.client
        ids = self.originals.ids(view)
        parameters = dict.fromkeys(self.guesses, {}) | {n: a.parameters() for n, a in suite.chosen.items()}
        due = {name: own for name, own in parameters.items() if place in self.attacked[name]}
        self.expected += len(due) * len(ids)
        return [n for n, own in due.items() if not self.rows.done(self._case(n, own, *place), ids)]

    def _audit(self, view: SeenUpdate, audited: bool) -> None:
        batch, seen = self.originals.batch(view) if self.simulated else (None, None)
        observation = observe_update(
            self.task,
            self.threat_model,
            model=self.models(view.sent),
            round=view.round,
            client=view.client,
            sent=view.sent,
            received=view.received,
            labels=self.originals.labels(view) if self.simulated else None,
            clients=len(view.members),
        )
        first_step = self.config.local.optimizer == "adamw" and observation.local_steps == 1
        raw = observation
        if first_step:
            observation, findings = undo_adam(raw)
        else:
            observation, findings = repair(raw) if audited else (repaired(raw), [])
        if Capability.CLIENT_SEED in self.threat_model.grants:
            observation = dataclasses.replace(observation, drawn=drawn_by(self.task, raw, observation, batch))
        observations = [*(self.memory.before(observation) if self.memory else []), observation]
        if audited:
            self._prepare(observations, view, batch, seen, findings)
        if self.memory:
            self.memory.add(observation)

    def _prepare(
        self,
        observations: list[Observation],
        view: SeenUpdate,
        batch: Batch | None,
        seen: Tensor | None,
        findings: Sequence[Finding],
    ) -> None:
        """Choose the attacks on an update, and line them up with what they need.

        Args:
            batch, seen: the originals and the model's input; None where they are not known.
        """
        audit, place = self.config.audit, (self.defense, view.round, view.client)
        budget = audit.budget_seconds()
        suite = select_attacks(audit.attacks, observations, self.threat_model, budget=budget, settings=self.settings)
        wanted, originals, guesses = self._wanted(view, suite), None, {}
        others = {name: NEVER_CAME for name in suite.chosen if name not in wanted}
        self.folder.note_attacks(self.defense, [n for n in suite.chosen if n in wanted], others | suite.left_out)
        self.folder.note_findings(self.defense, findings)
        if batch is not None:
            originals = batch.images.to(self.task.device)
            if self.task.learner.objective.whole_views > 1:  # the update holds views, and the image only through them
                originals = self.task.whole_views(batch, view.client, view.round, 0)
            guesses = self.originals.guesses(view, originals)
            if wanted:
                self.folder.save_images(*place, "original", originals)
                self.folder.save_images(*place, "seen", seen)
        self.waiting.append(
            UpdateJob(
                observations,
                originals,
                self.originals.ids(view),
                {name: attack for name, attack in suite.chosen.items() if name in wanted},
                {name: guess for name, guess in guesses.items() if name in wanted},
                Capability.MODEL_WEIGHTS in self.threat_model.grants,
                findings,
            )
        )
        if len(self.waiting) >= self.workers.together():
            self._attack_waiting()

    def _attack_waiting(self) -> None:
        """Run the attacks on the updates that wait for them, and write rows and pictures."""
        jobs, self.waiting = self.waiting, []
        jobs = jobs if self.workers.spread else [one for job in jobs for one in job.single()]
        for job, found in in_order(jobs, partial(run_job, self.score_images), self.workers):
            if isinstance(found, Lost):
                self._give_up(job, found)
            else:
                for scored in found:
                    self._write(scored, job)
            if self.workers.spread:
                self.progress.client_done()

    def _give_up(self, job: UpdateJob, lost: Lost) -> None:
        """Note attacks that have no rows on an update."""
        self.expected -= len(job.names) * len(job.image_ids)
        round, client = job.observation.round, job.observation.client
        self.folder.note_not_attacked(self.defense, round, client, job.names, lost.reason)
        for line in lost.lines([f"{self.defense}, round {round}, client {client}"]):
            self.progress.say(line)

    def _write(self, scored: Scored, job: UpdateJob) -> None:
        observation, norm = job.observation, job.observation.gradient_norm()
        place = self.defense, observation.round, observation.client
        if scored.images is not None:
            self.folder.save_images(*place, scored.attack, scored.images)
        if scored.known is not None:
            mask = scored.known.float().expand(-1, 3, -1, -1)
            self.folder.save_images(*place, f"{scored.attack}_known", mask)
        case = self._case(scored.attack, scored.parameters, observation.round, observation.client)
        for index, image_id in enumerate(job.image_ids):
            self.rows.append(self._provenance() | scored.row(case, image_id, norm, index))
        found = [r["psnr"] for r in scored.records]
        self.psnr[scored.attack] += filter(math.isfinite, found)  # of images that came back
        self.progress.attack_done(scored.attack, found)

    def _case(self, attack: str, parameters: Mapping[str, Any], round: int, client: int) -> dict[str, Any]:
        """The columns that identify this batch's rows, `records.rows.CASE`."""
        config, group = self.config, self.config.audit.secure_aggregation
        setting = self.task.setting if self.simulated else f"{self.task.setting.rpartition(', ')[0]}, not scored"
        return {
            "dataset": self.task.data.name,
            "model": self.task.model.name,
            "weights": self.task.model.provenance,
            "block": self.task.model.block,
            "defense": self.defense,
            "defense_parameters": self.task.defense.parameters(),
            "objective": self.task.objective_name,
            "objective_parameters": dict(vars(self.task.learner.objective)),
            "setting": setting + sum_in_words(group, self.alone),
            "precision": "float32",
            "update": config.federation.update,
            "batch_size": config.federation.batch_size * (1 if self.alone else max(group, 1)),
            "local_steps": self.task.steps(client),
            "seed": config.seed,
            "threat_model": sorted(c.value for c in config.threat_model().grants),
            "attack": attack,
            "attack_parameters": dict(parameters),
            "round": round,
            "client": client,
        }

    def _provenance(self) -> dict[str, Any]:
        return {"run_id": self.folder.run_id, **provenance.columns(self.task.device)}
