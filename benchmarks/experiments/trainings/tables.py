"""What the three tables of trainings have in common: train what is missing, then table, figure and run.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from rich.console import Console

from experiments.rendering import Rendering, csv, read_rows
from experiments.trainings.options import TrainingOptions, Variant
from experiments.trainings.seeds import markdown, seeds_table
from experiments.trainings.variants import TRAININGS, limits, note_history, rows_of, train_variants
from fedmjp.records.run_record import note_rows


@dataclass(frozen=True)
class TrainingTable:
    """One table of trainings.

    Attributes:
        name: of its command and of its folder.
        variants: its lines.
        paper: variant -> metric -> the paper's figure, as far as it gives one.
        metrics: shown in table.md.
        draw: from (rows, table, path) to figure.png.
        notes: variant -> what it is, in words.
        more: from the folder to further columns of table.md, head -> variant -> cell.
    """

    name: str
    options: TrainingOptions
    variants: Sequence[Variant]
    paper: Mapping[str, Mapping[str, float]]
    metrics: Sequence[str]
    draw: Callable[[pd.DataFrame, pd.DataFrame, Path], None]
    notes: Mapping[str, str] = field(default_factory=dict)
    more: Callable[[Path], Mapping[str, Mapping[str, str]]] = lambda folder: {}

    def run(self, console: Console) -> None:
        """Train what is missing, write tables and figure, and print the table."""
        o, program = self.options, f"python benchmarks/{self.name}.py"
        rows = train_variants(self.variants, o, console)
        if o.train:
            note_rows(o.trainings, program, read_rows(o.trainings, TRAININGS))
            note_history(o.trainings / "history", program)
        note_rows(o.out, program, rows, data=sorted(set(rows["provenance"])))
        self._rendering(o.trainings, self.name).write(o.out)
        console.print((o.out / "table.md").read_text(), highlight=False, markup=False, soft_wrap=True)
        console.print(f"table and figure: {o.out}", soft_wrap=True, highlight=False)

    def rendering(self, name: str = "") -> Rendering:
        """The rendering of the committed table, from the rows in results/trainings.

        Args:
            name: of its folder in results/ and of its block, where they are not called like its command.
        """
        return self._rendering(None, name or self.name)

    def _rendering(self, trainings: Path | None, name: str) -> Rendering:
        def rows(folder: Path) -> pd.DataFrame:
            return rows_of(self.variants, self.options, trainings or folder.parent / "trainings")

        return Rendering(
            name,
            lambda folder: self._files(rows(folder), folder),
            {name: lambda folder: (folder / "table.md").read_text(encoding="utf-8").strip()},
            lambda folder: self.draw(rows(folder), self._table(rows(folder)), folder / "figure.png"),
        )

    def _table(self, rows: pd.DataFrame) -> pd.DataFrame:
        return seeds_table(rows, {variant.name: variant.against for variant in self.variants}, self.paper)

    def _files(self, rows: pd.DataFrame, folder: Path) -> dict[str, str]:
        table = self._table(rows)
        text = markdown(table, self.metrics, self.notes, self.more(folder))
        return {"table.csv": csv(table, 5), "table.md": f"{text} {limits(rows, bool(self.paper))}\n"}
