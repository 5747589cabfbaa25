"""Federations of clients with different recipes, audited by the suite and gathered into one table."""

from __future__ import annotations

import json

import pandas as pd
from rich.console import Console

from experiments.client_recipes import RECIPES
from experiments.federations import gather_rows, reasons_not_run, run_federation
from experiments.recipes.options import Options
from experiments.recipes.render import RECIPE_TABLE
from experiments.rendering import read_rows
from experiments.scaffold import Failure
from fedmjp.before_start import check_before_start
from fedmjp.federation import ClientFailure
from fedmjp.records.run_record import note_rows

SHOWN = ["recipe", "defense", "answer", "attack", "psnr_median", "recovered", "count"]


def run(options: Options, console: Console) -> None:
    """Train and attack what is missing; an interrupted run leaves the table of what is finished.

    Raises:
        UsageError: options that cannot be met.
        Failure: a client failed.
    """
    runs = {name: options.federation(name) for name in options.chosen()}
    for config in runs.values():
        check_before_start(config)
    try:
        for number, (name, config) in enumerate(runs.items(), start=1):
            run_federation(config, f"recipe {number} of {len(runs)}: {name}", console)
    except ClientFailure as error:
        raise Failure(f"{error}\n{options.resume_hint()}") from error
    finally:
        _collect(options)
    table = pd.read_csv(options.out / "table.csv")
    console.print(table[SHOWN].round(3).to_string(index=False), highlight=False)
    console.print(f"table: {options.out}", soft_wrap=True, highlight=False)


def _collect(options: Options) -> None:
    """Gather the rows of every finished recipe in the folder, from this call and earlier ones, and write the table."""
    folders = {name: options.federation(name).out for name in RECIPES}
    done = {name: folder for name, folder in folders.items() if (folder / "run.json").is_file()}
    done = {n: f for n, f in done.items() if json.loads((f / "run.json").read_text(encoding="utf-8"))["finished"]}
    if not done:
        return
    gather_rows(list(done.values()), options.out)
    rows = read_rows(options.out)
    recipes = {json.loads((folder / "run.json").read_text(encoding="utf-8"))["run_id"]: n for n, folder in done.items()}
    reasons = reasons_not_run(list(done.values()), set(rows["attack"]))
    note_rows(options.out, "python benchmarks/recipes.py", rows, recipes=recipes, not_run=reasons)
    RECIPE_TABLE.write(options.out)
