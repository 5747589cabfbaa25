"""The folder of a run: rows, rounds, pictures, and the state to resume from.

All file names of a run stand here, but for those of its pictures (`fedmjp.records.images`) and of what its clients keep
(`fedmjp.records.client_states`).
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from attacks.findings import Finding
from attacks.registry import UsageError
from fedmjp.client import ClientTask
from fedmjp.config import RunConfig
from fedmjp.data.partitioning import statistics
from fedmjp.errors import Incomplete
from fedmjp.objectives import Objective
from fedmjp.records import provenance
from fedmjp.records.client_states import ClientStates
from fedmjp.records.failures import FailureLog
from fedmjp.records.files import read_record, read_sealed, write_record, write_sealed, write_whole
from fedmjp.records.image_digests import ImageDigests
from fedmjp.records.images import image_path, save_image
from fedmjp.records.lock import FolderLock
from fedmjp.records.rows import BASELINES, RowLog, load_rows
from fedmjp.records.server_state import ServerState

# What begins the names of tensors in a saved state, but for the model's own.
PARTS = {"kept": "kept:", "optimizer": "optimizer:"}
# Beside a guarantee where clients have data of their own.
IF_DEALT_OUT = "It holds for nodes that train on the images that the server deals out, and on no fewer."
ROUND_COLUMNS = ("defense", "round", "loss", "accuracy", "seconds")


class RunFolder:
    """`out`, opened for a new run or to go on with an unfinished one.

    Args:
        config: the run; `out` and `resume` decide what may be there already.

    Raises:
        UsageError: the folder holds a run and `resume` is not set, or one with other options, or another process writes
            to it.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config, self.out = config, config.out
        identity = _identity(config)
        self.run_id = provenance.run_id(identity)
        self.failures = FailureLog(self.out, self.run_id)
        self.clients = ClientStates(self.out / "state")
        self.description: dict = {"weights": {}, "ran": {}, "not_run": {}, "findings": {}, "not_attacked": []}
        self.description |= {"rows_expected": {}, "digests": {}}
        self._open(identity)

    def _open(self, identity: dict) -> None:
        found = self.out / "run.json"
        if found.exists() or (self.out / "rows.jsonl").exists():
            if not self.config.resume:
                raise UsageError(f"{self.out} holds a run already; pass --resume to finish it, or another --out")
            self._check_same(found, identity)
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(f"--out {self.out} is a file; pass a folder")
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {self.out} cannot be made ({error.strerror}); pass another folder") from error
        if not os.access(self.out, os.W_OK):
            raise UsageError(f"--out {self.out} cannot be written to; pass another folder")
        FolderLock(self.out)  # until the process ends
        self.description |= {
            "run_id": self.run_id,
            "command": provenance.command("python -m fedmjp.simulate"),
            "config": identity,
            "versions": provenance.versions(),
            "commit": provenance.commit(),
            "device": provenance.device_name(torch.device(self.config.device)),
            "seed": self.config.seed,
            "finished": False,
        }
        if self.is_finished():
            self._drop_states()  # of a run that ended between the mark and this
        else:
            self._write_description()  # before the first row, so that none is there without it

    def _check_same(self, found: Path, identity: dict) -> None:
        before = read_record(found, "start again in another --out")
        provenance.require_same(self.out, "run", before, identity)
        for entry in ("weights", "ran", "not_run", "findings", "rows_expected", "digests"):
            self.description[entry] = before.get(entry, {})
        self.description["not_attacked"] = before.get("not_attacked", [])

    def note_task(self, task: ClientTask, *, simulated: bool = True) -> None:
        """Record what a federation runs on, in run.json.

        Args:
            simulated: the clients hold the images that `task` deals out.
        """
        self.description["weights"][task.model.name] = task.model.provenance
        data = task.data
        self.description["data"] = {
            "name": data.name,
            "provenance": data.provenance,
            "skipped": list(data.skipped),
            "test_images": len(data.test),
            "partition": statistics(data.train.labels, task.parts).words(),
        }
        counted = task.learner.objective.accuracy_of
        if counted != Objective.accuracy_of:
            self.description["data"]["test_images"] = None  # an accuracy of other things has no interval over images
            self._note(
                f"The clients train the objective {self.config.objective}; accuracy counts {counted}, not classes."
            )
        self._note(task.guarantee if simulated or not task.guarantee else f"{task.guarantee} {IF_DEALT_OUT}")
        self._write_description()

    def _note(self, sentence: str) -> None:
        """Add a sentence to those that the report shows, once."""
        notes = self.description.setdefault("notes", [])
        if sentence and sentence not in notes:
            notes.append(sentence)

    def note_attacks(self, defense: str, chosen: Collection[str], left_out: Mapping[str, str]) -> None:
        """Record in run.json which registered attacks have run on no update of a federation yet, and why.

        Args:
            chosen: names of the attacks that run on one more update.
            left_out: name of every other registered attack -> why it does not.
        """
        ran = self.description["ran"].setdefault(defense, [])
        ran += [name for name in chosen if name not in ran]
        reasons = {**self.description["not_run"].get(defense, {}), **left_out}
        self.description["not_run"][defense] = {n: reason for n, reason in reasons.items() if n not in ran}
        self._write_description()

    def note_findings(self, defense: str, findings: Sequence[Finding]) -> None:
        """Record in run.json what was noticed about a federation's updates: of each kind the first sentence."""
        own = self.description["findings"].setdefault(defense, {})
        fresh = {finding.name: finding.sentence for finding in findings if finding.name not in own}
        if fresh:
            own |= fresh
            self._write_description()

    def note_not_attacked(self, defense: str, round: int, client: int, attacks: Sequence[str], reason: str) -> None:
        """Record in run.json attacks (and guesses) that were given up on one update, with the reason as a clause."""
        line = {"defense": defense, "round": round, "client": client, "attacks": list(attacks), "reason": reason}
        if line not in self.description["not_attacked"]:
            self.description["not_attacked"].append(line)
            self._write_description()

    def forget_not_attacked(self, defense: str, finished: int) -> None:
        """Leave out what was given up in rounds after the last finished one, which are run again."""
        lines = self.description["not_attacked"]
        self.description["not_attacked"] = [x for x in lines if x["defense"] != defense or x["round"] <= finished]

    def check_images(self, task: ClientTask) -> None:
        """Refuse to go on with other pictures than those that were attacked (images.sha256)."""
        train, digests = task.data.train, ImageDigests(self.out, task.data.name)
        places = task.config.attacked(BASELINES[0])
        group = max(task.config.audit.secure_aggregation, 1)
        clients = range(task.config.federation.clients) if group > 1 else None
        names = {i for r, c in places for member in (clients or (c,)) for i in task.batch_ids(member, r, 0)}
        where = {name: index for index, name in enumerate(train.ids)}
        indices = sorted(where[name] for name in names)
        for start in range(0, len(indices), 64):
            some = indices[start : start + 64]
            digests.check_contents([train.ids[i] for i in some], train.contents(some), train.size)

    def note_expected(self, defense: str, rows: int) -> None:
        """Record how many rows a finished federation has."""
        self.description["rows_expected"][defense] = rows
        self._write_description()

    def finish(self) -> None:
        """Mark the run as finished, once every row is there, and drop the states kept for resuming.

        Raises:
            UsageError: rows are missing.
        """
        path = self.out / "rows.jsonl"
        rows = load_rows(path, columns=["defense"], categories=True) if path.exists() else None
        for defense, expected in self.description["rows_expected"].items():
            found = 0 if rows is None else int((rows["defense"] == defense).sum())
            if found != expected:
                raise UsageError(
                    f"{self.out / 'rows.jsonl'} holds {found} rows of --defense {defense}, and {expected} were "
                    "written: restore the file, or start again in another --out"
                )
        self.description["finished"] = True
        self._write_description()
        self._drop_states()

    def _drop_states(self) -> None:
        if (self.out / "state").exists():
            shutil.rmtree(self.out / "state")

    def require_attacked(self) -> None:
        """Refuse to pass over attacks that were given up.

        Raises:
            Incomplete: names the first update.
        """
        if given_up := self.description["not_attacked"]:
            one, count = given_up[0], len(given_up)
            raise Incomplete(
                f"{self.out} lacks the attacks on {count} update{'s' * (count != 1)}, the first that of client "
                f"{one['client']} in round {one['round']} under --defense {one['defense']} ({one['reason']}); run.json "
                "names all; to try again, delete the folder or take another one"
            )

    def is_finished(self) -> bool:
        """Whether the folder holds this very run, finished."""
        path = self.out / "run.json"
        return path.exists() and bool(read_record(path).get("finished"))

    def _write_description(self) -> None:
        write_record(self.out / "run.json", self.description)

    def open_rows(self) -> RowLog:
        """The log of rows, to append to."""
        return RowLog(self.out / "rows.jsonl")

    def has_round(self, defense: str, number: int) -> bool:
        """Whether the round's evaluation is on disk."""
        lines = csv.DictReader(io.StringIO(self._rounds()))
        return any(r["defense"] == defense and r["round"] == str(number) for r in lines)

    def _rounds(self) -> str:
        """Content of rounds.csv, "" where there is none.

        Raises:
            UsageError: it is not as it was written.
        """
        path = self.out / "rounds.csv"
        content = path.read_bytes() if path.exists() else b""
        wanted = self.description["digests"].get("rounds.csv", [])
        if wanted and hashlib.sha256(content).hexdigest() not in wanted:
            raise UsageError(f"{path} is not as it was written (digest); restore it, or start again in another --out")
        return content.decode()

    def append_round(self, defense: str, number: int, loss: float, accuracy: float, seconds: float) -> None:
        """Add a line to rounds.csv."""
        before = self._rounds()
        text = io.StringIO(before, newline="")
        text.seek(0, io.SEEK_END)
        writer = csv.writer(text)
        if not before:
            writer.writerow(ROUND_COLUMNS)
        writer.writerow([defense, number, f"{loss:.6f}", f"{accuracy:.6f}", f"{seconds:.3f}"])
        after = text.getvalue()
        # Both digests hold until the file is replaced, so that a crash between the two writes does no harm.
        digests = [hashlib.sha256(content.encode()).hexdigest() for content in (before, after)]
        self.description["digests"]["rounds.csv"] = digests
        self._write_description()
        write_whole(self.out / "rounds.csv", after.encode())

    def save_state(self, defense: str, number: int, state: ServerState, expected: int) -> None:
        """Keep what the server holds after round `number`, in place of what it held before, and the clients' of then.

        Args:
            expected: rows that the federation has up to this round.
        """
        folder = self.out / "state"
        folder.mkdir(exist_ok=True)
        whole = dict(state.weights)
        for part, prefix in PARTS.items():
            whole |= {prefix + name: tensor for name, tensor in getattr(state, part).items()}
        content = save({n: t.contiguous().clone() for n, t in whole.items()})
        clients = self.clients.last_rounds(defense, number)
        about = {"round": number, "expected": expected, "clients": sorted(clients.items())}
        write_sealed(self._state_file(defense), content, about)
        self.clients.keep_only(defense, clients)

    def _state_file(self, defense: str) -> Path:
        return self.out / "state" / f"{defense}.state"

    def memory_folder(self, defense: str) -> Path:
        """Where the server's memory of old updates is kept while the run goes on."""
        return self.out / "state" / f"{defense}_updates"

    def load_state(self, defense: str) -> tuple[int, ServerState | None, int]:
        """(last finished round, what the server held after it, rows up to it), or (0, None, 0) where nothing was saved.

        What clients have kept since then is dropped: the round that was interrupted is run again.

        Raises:
            UsageError: a file is damaged, or one of what a client kept is missing.
        """
        path = self._state_file(defense)
        if not path.exists():
            return 0, None, 0
        content, about = read_sealed(path, "the run cannot go on; start it again in another --out")
        clients = dict(about.get("clients", []))  # older versions kept none
        self.clients.check(defense, clients)
        self.clients.keep_only(defense, clients)
        found = load(content)
        parts = {
            part: {name.removeprefix(prefix): found.pop(name) for name in list(found) if name.startswith(prefix)}
            for part, prefix in PARTS.items()
        }
        return int(about["round"]), ServerState(found, **parts), int(about["expected"])

    def save_images(self, defense: str, round: int, client: int, what: str, images: Tensor) -> None:
        """Write (B, C, H, W) images in [0, 1] as PNG files; none for an image that is NaN."""
        for index, image in enumerate(images):
            if image.isnan().any():
                continue
            save_image(image, image_path(self.out, defense, round, client, index, what))


def holds_finished(config: RunConfig) -> bool:
    """Whether `config.out` holds this very run, finished, at whatever commit.

    Raises:
        UsageError: run.json cannot be read.
    """
    path = config.out / "run.json"
    found = read_record(path, "pass another --out") if path.exists() else {}
    return bool(found.get("finished")) and found.get("run_id") == provenance.run_id(_identity(config))


def test_images_of(config: RunConfig) -> int:
    """Test images behind each accuracy in the run's rounds.csv."""
    return int(read_record(config.out / "run.json")["data"]["test_images"])


def _identity(config: RunConfig) -> dict:
    """Everything that decides about numbers, so that the same command has the same id wherever it writes."""
    identity = json.loads(config.to_json())
    for option in ("out", "resume", "log", "computing"):
        identity.pop(option)
    return identity
