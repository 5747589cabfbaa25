"""The folder of a run: rows, rounds, pictures, and the state to resume from. All file names of a run stand here."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from attacks.findings import Finding
from attacks.registry import UsageError
from fedmjp.client import ClientTask
from fedmjp.config import RunConfig
from fedmjp.data.partitioning import statistics
from fedmjp.objectives import Objective
from fedmjp.records import provenance
from fedmjp.records.lock import FolderLock
from fedmjp.records.rows import RowLog
from fedmjp.records.server_state import ServerState

# What begins the names of tensors in a saved state, but for the model's own.
PARTS = {"kept": "kept:", "optimizer": "optimizer:"}
QUICK = 1  # compression of PNG files: a tenth larger than the best one's, in a third of the time
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
        self.description: dict = {"weights": {}, "ran": {}, "not_run": {}, "findings": {}, "failures": []}
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

    def _check_same(self, found: Path, identity: dict) -> None:
        try:
            before = json.loads(found.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise UsageError(
                f"{found} cannot be read ({type(error).__name__}); start again in another --out"
            ) from error
        provenance.require_same(self.out, "run", before, identity)
        for entry in ("weights", "ran", "not_run", "findings"):
            self.description[entry] = before.get(entry, {})
        self.description["failures"] = before.get("failures", [])

    def note_task(self, task: ClientTask) -> None:
        """Record what a federation runs on, in run.json."""
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
        self._note(task.guarantee)
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

    def note_failure(self, defense: str, round: int, client: int, reason: str) -> None:
        """Record in run.json a client that failed, or whose reply was refused, with the end of a sentence about it."""
        failure = {"defense": defense, "round": round, "client": client, "reason": reason}
        if failure not in self.description["failures"]:
            self.description["failures"].append(failure)
            self._write_description()

    def finish(self) -> None:
        """Mark the run as finished and drop the states kept for resuming."""
        self.description["finished"] = True
        self._write_description()
        if (self.out / "state").exists():
            shutil.rmtree(self.out / "state")

    def is_finished(self) -> bool:
        """Whether the folder holds this very run, finished."""
        path = self.out / "run.json"
        return path.exists() and bool(json.loads(path.read_text()).get("finished"))

    def _write_description(self) -> None:
        write_whole(self.out / "run.json", json.dumps(self.description, indent=2).encode())

    def open_rows(self) -> RowLog:
        """The log of rows, to append to."""
        return RowLog(self.out / "rows.jsonl")

    def has_round(self, defense: str, number: int) -> bool:
        """Whether the round's evaluation is on disk."""
        path = self.out / "rounds.csv"
        if not path.exists():
            return False
        with path.open(newline="") as file:
            return any(r["defense"] == defense and r["round"] == str(number) for r in csv.DictReader(file))

    def append_round(self, defense: str, number: int, loss: float, accuracy: float, seconds: float) -> None:
        """Add a line to rounds.csv."""
        path = self.out / "rounds.csv"
        new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(ROUND_COLUMNS)
            writer.writerow([defense, number, f"{loss:.6f}", f"{accuracy:.6f}", f"{seconds:.3f}"])

    def save_state(self, defense: str, number: int, state: ServerState) -> None:
        """Keep what the server holds after round `number`, in place of what it held before."""
        folder = self.out / "state"
        folder.mkdir(exist_ok=True)
        temporary = folder / f"{defense}.tmp"
        whole = dict(state.weights)
        for part, prefix in PARTS.items():
            whole |= {prefix + name: tensor for name, tensor in getattr(state, part).items()}
        save_file({n: t.contiguous().clone() for n, t in whole.items()}, temporary, metadata={"round": str(number)})
        temporary.replace(folder / f"{defense}.safetensors")

    def memory_folder(self, defense: str) -> Path:
        """Where the server's memory of old updates is kept while the run goes on."""
        return self.out / "state" / f"{defense}_updates"

    def load_state(self, defense: str) -> tuple[int, ServerState | None]:
        """(last finished round, what the server held after it), or (0, None) where nothing was saved."""
        path = self.out / "state" / f"{defense}.safetensors"
        if not path.exists():
            return 0, None
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            number = int(file.metadata()["round"])
        parts = {
            part: {name.removeprefix(prefix): found.pop(name) for name in list(found) if name.startswith(prefix)}
            for part, prefix in PARTS.items()
        }
        return number, ServerState(found, **parts)

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
    try:
        found = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, json.JSONDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({type(error).__name__}); pass another --out") from error
    return bool(found.get("finished")) and found.get("run_id") == provenance.run_id(_identity(config))


def test_images_of(config: RunConfig) -> int:
    """Test images behind each accuracy in the run's rounds.csv."""
    return int(json.loads((config.out / "run.json").read_text())["data"]["test_images"])


def _identity(config: RunConfig) -> dict:
    """Everything that decides about numbers, so that the same command has the same id wherever it writes."""
    identity = json.loads(config.to_json())
    for option in ("out", "resume", "log"):
        identity.pop(option)
    return identity


def image_path(out: Path, defense: str, round: int, client: int, image: int, what: str) -> Path:
    """The file of one audited image in a run's folder.

    Args:
        image: its place in the client's batch.
        what: "original", "seen", an attack's name, or that name with "_known" for the pixels it vouches for.
    """
    return out / "images" / defense / f"round{round:03d}_client{client:03d}_image{image}_{what}.png"


def save_image(image: Tensor, path: Path) -> None:
    """Write one image (C, H, W) in [0, 1] as a PNG file; C is 3, or 1 for a grey image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = (image.clamp(0, 1) * 255).round().byte().expand(3, -1, -1).permute(1, 2, 0).cpu().numpy()
    Image.fromarray(pixels).save(path, compress_level=QUICK)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    temporary.replace(path)
