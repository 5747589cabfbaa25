"""Options of the measures of scale."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.scaffold import RowOptions, check_positive


@dataclass(frozen=True)
class Options(RowOptions):
    """How do time and memory grow with clients, and with the rows of a report?

        python benchmarks/scale.py --data-path DIR                                  every size
        python benchmarks/scale.py --log-rows 10000 --clients --audited             a report alone

    A round is one of the local engine: every client trains on one image and sends its gradient, and the server takes
    the mean; nothing is attacked. An audit is such a round of `python -m fedmjp.simulate` whose every update is
    attacked by the closed form `patch_embedding`, scored, and written with its pictures. A report is what that command
    does once its last row is written: it reads the log, renders the page and prints the table. Its log repeats the rows
    of the README's run (results/simulate), with other clients and images and with scores moved at random.

    Each size is measured once, in a process of its own with one thread; its memory is the most that the process held,
    libraries among it. Writes rows.jsonl.gz, table.csv and run.json to --out; --resume adds sizes.
    """

    clients: tuple[int, ...] = (10, 100, 1000, 10_000)
    """Clients of a round."""
    audited: tuple[int, ...] = (10, 100)
    """Clients of an audit."""
    log_rows: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    """Rows of a report's log; a million take 1.3 GB beside the table while they are measured."""
    model: str = "vit_micro8_32"
    """The clients' model, random weights; the default is the smallest of all."""
    audit_model: str = "deit_s"
    """Model of the audits, random weights."""
    data: str = "cifar10"
    """The clients' data set, of at least as many images as there are clients."""
    data_path: Path | None = None
    """Local copy of --data."""
    threads: int = 1
    """Torch threads."""
    out: Path = Path("runs/scale")
    """Folder of rows and table (the committed ones stand in results/scale)."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        check_positive(self, "clients", "audited", "log_rows", "threads")
        super().validate()
