"""Audit a running Flower app that is not ours: only updates are seen, and the answer is pictures, diagnoses and a page.

    watcher = Watcher(model, image_shape=(3, 224, 224), mean=mean, std=std, learning_rate=0.01)
    FedAvg().start(TapGrid(grid, watcher), initial_arrays, num_rounds=1)

Nobody but the client has the originals, so nothing is scored: an answer counts where it is certified, that is, where it
reproduces the update (`attacks.certificate`). For a training step in plain PyTorch, where the originals are at hand:
`fedmjp.audit.user_model.audit_gradient`.
"""

from __future__ import annotations

import atexit
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor, nn

from attacks import Attack, Capability, Observation, Reconstruction, ThreatModel, UsageError
from attacks.classifier import read_step
from attacks.findings import Finding
from attacks.fingerprints import minus_weights, remove_weight_decay, repair
from attacks.memory import remember
from attacks.momentum import KeptMomentum
from fedmjp.audit.aggregate import sum_in_words
from fedmjp.audit.folder import DEFENSE, AuditFolder, Subject, holds_results
from fedmjp.audit.harness import answer, unscored
from fedmjp.audit.inputs import check_gradients, check_normalisation, unwrap
from fedmjp.audit.observe import as_granted, as_trained, model_as_sent, model_with_sent_layers, undo_adam
from fedmjp.audit.user_model import choose_attacks, readable_tokenizer
from fedmjp.audit.verdict import Verdict, judge
from fedmjp.budgets import AUTO, DEFAULT_BUDGET
from fedmjp.messages import tensors_of
from fedmjp.records import provenance
from fedmjp.records.failures import NOT_AUDITED
from fedmjp.records.images import save_image
from fedmjp.records.rows import load_rows

SENDS = ("weights", "gradient")
SGD, FIRST_STEPS = "sgd", ("adam", "adamw")
MOST_PANELS = 8  # updates in the page's figure
UNCHECKED = Finding(
    "unchecked_step",
    "that the update is one gradient step as stated is assumed: it holds no classifier's gradient of three classes or "
    "more, by whose rank that could be checked",
    fixed=True,
)
LOG = logging.getLogger(__name__)


class Watcher:
    """Observer for `TapGrid`: attacks each training reply of any Flower app that answers with the model's arrays.

    Replies with gradients and replies with weights (FedAvg) are both understood; arrays are matched to parameters by
    name, which is what `ArrayRecord(model.state_dict())` gives. A reply that cannot be read is a line in `problems`;
    the app's training goes on in any case. What is not given about the clients' training is assumed and written down
    in `assumptions`.

    Args:
        model: the architecture that the app trains.
        image_shape: (C, H, W) of an input.
        mean, std: the clients' normalisation.
        sends: "weights" or "gradient".
        optimiser: of the clients: "sgd"; or "adam" or "adamw" that start anew in every round, whose first step is
            undone as far as the digits of the weights show it. Others cannot be turned back into a gradient.
        epsilon: of Adam.
        learning_rate: of the clients' SGD, to turn weights back into a gradient.
        weight_decay: of the clients' SGD; it is subtracted.
        momentum: of the clients' SGD; what a client keeps of it from round to round is subtracted where its updates
            show that it does. Within several local steps it cannot be undone.
        batch_size, local_steps: as the clients train; they decide what the closed forms can promise.
        attacks: "auto", "all", or names and instances (`MJPSubspace(prior=VectorialVariation(strength=20))`).
        threat_model: what the adversary is granted; answers are certified by the auditor, who has the weights anyway.
        budget: seconds of one CPU core that "auto" may plan for each update.
        out: folder for pictures, rows and page; with a number added where it holds results already.

    Attributes:
        found: (node, attack, reconstruction) of every answer, in order.
        problems: what could not be read or attacked, one sentence each, with round and node.
        assumptions: what is assumed of the clients' training, because the caller did not give it.
        findings: what was recognised about the updates: name -> sentence of the first one.

    Raises:
        UsageError: the model has no tokenizer that the attacks know, an argument that is none, or an unknown attack.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        image_shape: tuple[int, int, int],
        mean: Sequence[float],
        std: Sequence[float],
        sends: str = "weights",
        optimiser: str | None = None,
        epsilon: float = 1e-8,
        learning_rate: float | None = None,
        weight_decay: float | None = None,
        momentum: float | None = None,
        batch_size: int | None = None,
        local_steps: int | None = None,
        attacks: str | Sequence[str | Attack] = AUTO,
        threat_model: ThreatModel | None = None,
        budget: float = DEFAULT_BUDGET,
        out: str | Path = "leaks",
    ) -> None:
        self.model = unwrap(model)[0]
        readable_tokenizer(self.model, tuple(image_shape))
        self.mean, self.std = check_normalisation(mean, std, image_shape[0])
        if sends not in SENDS:
            raise UsageError(f"sends must be 'weights' or 'gradient', not {sends!r}")
        for name, value in (("learning_rate", learning_rate), ("batch_size", batch_size), ("local_steps", local_steps)):
            if value is not None and not value > 0:
                raise UsageError(f"{name} must be positive, not {value}")
        choose_attacks(attacks, [], ThreatModel() if threat_model is None else threat_model, budget)
        self.assumptions = _assumed(sends, optimiser, learning_rate, weight_decay, momentum, batch_size, local_steps)
        self.shape, self.sends = tuple(image_shape), sends
        self.learning_rate, self.weight_decay = learning_rate or 1.0, weight_decay or 0.0
        self.batch_size, self.local_steps = batch_size or 1, local_steps or 1
        self.attacks, self.budget, self.threat_model = attacks, budget, threat_model or ThreatModel()
        self.out = _free(Path(out))
        self._momentum = KeptMomentum(momentum)
        self._adam = (optimiser or "").lower() if _is_undone(sends, optimiser, learning_rate, local_steps) else ""
        self._epsilon = epsilon
        self.found: list[tuple[int, str, Reconstruction]] = []
        self.problems: list[str] = []
        self.findings: dict[str, str] = {}
        self.not_run: dict[str, str] = {}
        self._subject = Subject(
            type(self.model).__name__, "the app's own", "no originals: nothing is scored", self.threat_model
        )
        self._folder: AuditFolder | None = None
        self._earlier: dict[int, list[Observation]] = defaultdict(list)
        self._pictures: dict[tuple[int, int, int], dict[str, tuple[Tensor | None, str, Tensor | None]]] = {}

    def sees_sums(self, size: int, alone: bool) -> None:
        """Have the rows say that the server sees sums of `size` clients, of which one is singled out where `alone`."""
        self.threat_model = ThreatModel(self.threat_model.grants | {Capability.AGGREGATE_ONLY})
        setting = self._subject.setting + sum_in_words(size, alone)
        self._subject = replace(self._subject, setting=setting, threat_model=self.threat_model)

    def __call__(self, sent: Mapping, received: Mapping, node: int) -> None:
        """Attack one reply; `found` gains a line for each attack and `out` a picture for each image.

        Never raises but for an interrupt: what goes wrong is a line in `problems`.
        """
        number = 0
        try:
            number = self._round(sent, node)
            self._attack(sent, received, node, number)
        except Exception as error:  # the app's training must go on
            self.problems.append(f"round {number}, node {node}: {error}".splitlines()[0])
            LOG.warning("not audited: %s", self.problems[-1])
            with suppress(Exception):  # such as a full disk; the problem is logged already
                reason = str(error).partition("\n")[0]
                self._opened().failures.note(DEFENSE, number, node, NOT_AUDITED, reason)

    def _round(self, sent: Mapping, node: int) -> int:
        """Number of the round, as Flower's strategies send it; else the number of the node's reply."""
        for record in sent.values():
            number = record.get("server-round") if isinstance(record, Mapping) else None
            if isinstance(number, int):
                return number
        return len(self._earlier[node]) + 1

    def _attack(self, sent: Mapping, received: Mapping, node: int, number: int) -> None:
        observation, findings = self._observe(sent, received, node, number)
        observation = as_granted(observation, self.threat_model)
        self.findings.update({f.name: f.sentence for f in findings if f.name not in self.findings})
        observations = [*self._earlier[node], observation]
        suite = choose_attacks(self.attacks, observations, self.threat_model, self.budget)
        self.not_run |= suite.left_out
        self._opened()
        taken = {}
        for name, attack in suite.chosen.items():
            found = answer(attack, observations, weights_granted=True)
            self._keep(observation, name, attack, found, findings)
            taken[name] = found.seconds
        overrun = suite.overrun(taken, self.budget)
        if overrun:
            self.findings.setdefault("budget", overrun)
        layers = {n for a in suite.chosen.values() for n in a.remembered_layers(observation.model, self.shape)}
        self._earlier[node].append(remember(observation, sorted(layers)))

    def _opened(self) -> AuditFolder:
        """The folder, made by the first row."""
        if self._folder is None:
            self._folder = AuditFolder(self.out, self._subject)
            atexit.register(self.finish)
        return self._folder

    def _observe(self, sent: Mapping, received: Mapping, node: int, number: int) -> tuple[Observation, list[Finding]]:
        """The update without weight decay, and what was noticed about it.

        Raises:
            UsageError: the messages do not hold the model's arrays by name, or not finite ones.
        """
        before, after = tensors_of(sent), tensors_of(received)
        model = model_with_sent_layers(self.model, before)
        names = [name for name, _ in model.named_parameters()]
        before, _ = check_gradients(model, before, "sent weight")
        lacking = [name for name in names if name not in before]
        if lacking:
            raise UsageError(f"the message to the client lacks {lacking[0]}: send ArrayRecord(model.state_dict())")
        gradients, findings = check_gradients(model, after, "gradient" if self.sends == "gradient" else "weight")
        for finding in findings:
            if not finding.fixed:
                self.problems.append(f"round {number}, node {node}: {finding.sentence}")
        gradients = {n: g.to(torch.promote_types(before[n].dtype, g.dtype)) for n, g in gradients.items()}
        if self.sends == "weights":
            gradients = {n: (before[n].to(g) - g) / self.learning_rate for n, g in gradients.items()}
        raw = Observation(
            gradients,
            as_trained(model_as_sent(self.model, before), gradients),
            self.batch_size,
            self.shape,
            self.mean,
            self.std,
            kind="weights" if self.sends == "weights" else "gradient",
            local_steps=self.local_steps,
            learning_rate=self.learning_rate,
            round=number,
            client=node,
            weights_granted=Capability.MODEL_WEIGHTS in self.threat_model.grants,
        )
        decayed = before if self.weight_decay else {}
        if self._adam:
            return self._undone(raw, decayed)
        observation, kept = self._momentum(raw, self._minus_decay(raw, decayed))
        observation, recognised = repair(observation)
        unread = not recognised and read_step(observation) is None
        found = [kept, *recognised, UNCHECKED if unread else None]
        return observation, [finding for finding in found if finding is not None]

    def _undone(self, raw: Observation, decayed: Mapping[str, Tensor]) -> tuple[Observation, list[Finding]]:
        """The update before the first step of Adam, whose weight decay is part of the gradient, or of AdamW."""
        within = self._adam == "adam"
        observation, found = undo_adam(raw if within else self._minus_decay(raw, decayed), self._epsilon)
        undone = observation.kind == "gradient"
        return self._minus_decay(observation, decayed) if within and undone else observation, found

    def _minus_decay(self, observation: Observation, decayed: Mapping[str, Tensor]) -> Observation:
        """The update without the decay of the parameters in `decayed`, as sent; under SGD of those that show one."""
        if decayed and not self._adam:
            return remove_weight_decay(observation, self.weight_decay, all_decay=True)
        rate = observation.learning_rate if observation.kind == "weights" else 0.0
        gradients = {
            n: minus_weights(g, decayed[n].to(g), self.weight_decay, rate) if n in decayed else g
            for n, g in observation.gradients.items()
        }
        return replace(observation, gradients=gradients)

    def _keep(
        self, observation: Observation, name: str, attack: Attack, found: Reconstruction, findings: Sequence[Finding]
    ) -> None:
        """Write one attack's rows and pictures."""
        size = observation.num_examples
        scored = unscored(attack, name, found, size, findings)
        images, place = scored.images, (observation.round, observation.client)
        self.found.append((observation.client, name, replace(scored.reconstruction, diagnosis=scored.diagnosis)))
        for row in self._subject.rows(observation, scored, [f"image {i}" for i in range(size)]):
            self._folder.log.append(row)
        for index in range(size):
            image = None if images is None or index >= len(images) else images[index].cpu()
            if image is not None:
                file = f"round{place[0]:03d}_node{place[1]}_image{index}_{name}.png"
                save_image(image, self.out / "images" / file)
            if (*place, index) in self._pictures or len(self._pictures) < MOST_PANELS:
                known = None if scored.known is None or image is None else scored.known[index].cpu()
                self._pictures.setdefault((*place, index), {})[name] = image, scored.diagnosis, known

    def earlier(self, node: int) -> list[Observation]:
        """The parts of a node's earlier updates that attacks over several rounds read, oldest first."""
        return list(self._earlier[node])

    def verdict(self) -> Verdict:
        """What all answers so far amount to.

        Raises:
            UsageError: no update was attacked yet.
        """
        if not self.found:
            raise UsageError(f"no update was attacked ({'; '.join(self.problems[:1]) or 'no reply was seen'})")
        ran = {name for _, name, _ in self.found}
        return judge(
            load_rows(self.out / "rows.jsonl"), {n: reason for n, reason in self.not_run.items() if n not in ran}
        )

    def save(self) -> Path | None:
        """Write run.json and the page of what was seen so far; its path, or None where no update was attacked."""
        if not self.found:
            return None
        from fedmjp.report import Panel, Reconstructed

        verdict = self.verdict()
        panels = [
            Panel(
                f"round {number}, node {node}, image {index}",
                None,
                None,
                {name: Reconstructed(image, None, *others) for name, (image, *others) in own.items()},
            )
            for (number, node, index), own in self._pictures.items()
        ]
        options = {"sends": self.sends, "learning_rate": self.learning_rate, "batch_size": self.batch_size}
        return self._folder.finish(
            panels,
            options=options | {"local_steps": self.local_steps, "mean": self.mean, "std": self.std},
            ran=list(dict.fromkeys(name for _, name, _ in self.found)),
            not_run=verdict.not_run,
            device=provenance.device_name(next(self.model.parameters()).device),
            notes=[verdict.headline(), *self.assumptions, *self.findings.values(), *self.problems],
        )

    def round_done(self) -> Path | None:
        """`save` after a round, without ever raising: the app's training must go on.

        Flower ends the process of a ServerApp without Python's exit handlers, so the page cannot wait for the exit.
        """
        try:
            page = self.save()
        except Exception as error:  # the app's result must not be lost
            self.problems.append(f"the page could not be written: {error}".splitlines()[0])
            LOG.warning("%s", self.problems[-1])
            return None
        if page is not None:
            LOG.warning("%s; page: %s", self.verdict().headline(), page)
        elif self.problems:
            LOG.warning("no update was audited: %s", self.problems[0])
        return page

    def finish(self) -> Path | None:
        """`round_done`, once and for all; called at the interpreter's exit if not before. Never raises."""
        atexit.unregister(self.finish)
        page = self.round_done()
        if self._folder is not None:
            self._folder.close()
        return page

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()


def _is_undone(sends: str, optimiser: str | None, learning_rate: float | None, local_steps: int | None) -> bool:
    """Whether the clients' optimiser takes one step that `undo_first_step` turns back."""
    one_step = sends == "weights" and (local_steps or 1) == 1 and learning_rate is not None
    return one_step and optimiser is not None and optimiser.lower() in FIRST_STEPS


def _assumed(
    sends: str,
    optimiser: str | None,
    learning_rate: float | None,
    weight_decay: float | None,
    momentum: float | None,
    batch_size: int | None,
    local_steps: int | None,
) -> list[str]:
    """What the caller did not give of the clients' training, or cannot be undone, one sentence each."""
    found = []
    if batch_size is None:
        found.append("batch_size was not given: batches of one image are assumed")
    if local_steps is None:
        found.append("local_steps was not given: one local step is assumed")
    if sends == "gradient":
        return found
    if _is_undone(sends, optimiser, learning_rate, local_steps):
        found.append(f"the clients' {optimiser} is taken to start anew in every round: its first step is undone")
    elif optimiser is not None and optimiser.lower() != SGD:
        found.append(f"the clients' optimiser {optimiser} cannot be undone: its steps are taken for those of SGD")
    if optimiser is None:
        found.append("optimiser was not given: plain SGD is assumed")
    if learning_rate is None:
        found.append(
            "learning_rate was not given: it is read from the classifier's gradient of one step on one image; "
            "otherwise the update is known up to a factor, and no answer can be certified"
        )
    if weight_decay is None:
        found.append("weight_decay was not given: it is removed where it can be recognised")
    if momentum and (local_steps or 1) > 1:
        found.append(f"the momentum {momentum:g} of {local_steps} local steps cannot be undone: it is taken for 0")
    return found


def _free(out: Path) -> Path:
    """`out`, or the first of out-2, out-3, ... that holds no results."""
    candidates = (out if number == 1 else out.with_name(f"{out.name}-{number}") for number in count(1))
    return next(folder for folder in candidates if not holds_results(folder))
