"""The folder of an audit of a user's own model or app: the same files as a run of ours leaves.

rows.jsonl (one line an image and attack), run.json, the pictures and report.html. `fedmjp.records.run_folder` is the
folder of our own federations, which can be resumed; file names and formats are the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attacks import Observation, ThreatModel, UsageError
from fedmjp.audit.harness import Scored
from fedmjp.records import provenance
from fedmjp.records.failures import FailureLog
from fedmjp.records.files import write_record
from fedmjp.records.rows import RowLog

if TYPE_CHECKING:
    from fedmjp.report import Panel

DEFENSE = "as_given"  # what a user's client does to its update is the user's to know


@dataclass(frozen=True)
class Subject:
    """What is audited, for the columns of its rows.

    Attributes:
        model: name of the model's class.
        dataset: where the images come from.
        setting: what the reconstructions are compared with.
        threat_model: what the adversary is granted.
    """

    model: str
    dataset: str
    setting: str
    threat_model: ThreatModel

    def rows(self, observation: Observation, scored: Scored, image_ids: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The results rows of one attack on one update, one an image."""
        norm, device = observation.gradient_norm(), next(iter(observation.gradients.values())).device
        run = {"run_id": self.run_id(), **provenance.columns(device)}
        case = {
            "dataset": self.dataset,
            "model": self.model,
            "weights": "as given",
            "block": "own",
            "defense": DEFENSE,
            "defense_parameters": {},
            "setting": self.setting,
            "precision": str(next(iter(observation.gradients.values())).dtype).removeprefix("torch."),
            "update": observation.kind,
            "batch_size": observation.num_examples,
            "local_steps": observation.local_steps,
            "seed": 0,
            "threat_model": sorted(c.value for c in self.threat_model.grants),
            "attack": scored.attack,
            "attack_parameters": dict(scored.parameters),
            "round": observation.round,
            "client": observation.client,
        }
        for place, image_id in enumerate(image_ids):
            yield run | scored.row(case, image_id, norm, place)

    def run_id(self) -> str:
        """Short id of what is audited."""
        return provenance.run_id({"model": self.model, "dataset": self.dataset, "setting": self.setting})


class AuditFolder:
    """A new folder, to which rows are appended and which ends with a page.

    Args:
        out: the folder.
        subject: what is audited.

    Raises:
        UsageError: it holds results already, or cannot be written to.
    """

    def __init__(self, out: Path, subject: Subject) -> None:
        self.out, self.subject = out, subject
        if holds_results(out):
            raise UsageError(f"{out} holds results already; pass another folder")
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{out} cannot be made ({error.strerror}); pass another folder") from error
        if not os.access(out, os.W_OK):
            raise UsageError(f"{out} cannot be written to; pass another folder")
        self.log, self.failures = RowLog(out / "rows.jsonl"), FailureLog(out, subject.run_id())

    def close(self) -> None:
        """Close the files of rows."""
        self.log.close()
        self.failures.close()

    def finish(
        self,
        panels: Sequence[Panel],
        *,
        options: Mapping[str, Any],
        ran: Sequence[str],
        not_run: Mapping[str, str],
        device: str,
        notes: Sequence[str],
    ) -> Path:
        """Write run.json and the page; may be called again after more rows.

        Args:
            panels: rows of the figure of reconstructions.
            options: what the audit was called with.
            ran: names of the attacks that ran.
            not_run: every other registered attack -> why it did not.
            device: where it was computed, in words.
            notes: remarks for the reader, on the page.

        Returns:
            Path of report.html.
        """
        from fedmjp.report import render  # matplotlib and jinja2, which an audit without a page does not need

        description = {
            "run_id": self.subject.run_id(),
            "command": provenance.command(Path(sys.argv[0]).name),
            "config": dict(options),
            "versions": provenance.versions(),
            "commit": provenance.commit(),
            "device": device,
            "seed": 0,
            "weights": {self.subject.model: "as given"},
            "data": {"name": self.subject.dataset, "provenance": self.subject.setting, "skipped": []},
            "ran": {DEFENSE: list(ran)},
            "not_run": {DEFENSE: dict(not_run)},
            "notes": list(notes),
            "finished": True,
        }
        write_record(self.out / "run.json", description)
        return render(self.out, list(panels))


def holds_results(out: Path) -> bool:
    """Whether a folder holds rows of an earlier audit or run."""
    return (out / "rows.jsonl").exists() or (out / "run.json").exists()
