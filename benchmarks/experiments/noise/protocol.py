"""Federations under noise, attacked by what weighs it, with the bound beside; the protocol stands in `options`."""

from __future__ import annotations

import pandas as pd
from rich.console import Console

from experiments.federations import gather_rows, run_federation
from experiments.noise.bounds import bounds
from experiments.noise.options import Options
from experiments.noise.render import BOUNDS, KEYS, NOISE_TABLE, noise_block
from experiments.rendering import csv, read_rows
from experiments.scaffold import Failure
from fedmjp.before_start import check_before_start
from fedmjp.defenses.chain import split_chain
from fedmjp.federation import ClientFailure
from fedmjp.records.files import write_whole
from fedmjp.records.run_record import note_rows


def run(options: Options, console: Console) -> None:
    """Train and attack what is missing, compute the bounds, and write the table.

    Raises:
        UsageError: options that cannot be met.
        Failure: a client failed.
    """
    runs = [options.federation(entry) for entry in options.defenses]
    for config in runs:
        check_before_start(config)
    found = []
    try:
        for number, config in enumerate(runs, start=1):
            run_federation(config, f"federation {number} of {len(runs)}: {config.defense[0]}", console)
            found += bounds(config, options.updates) if len(split_chain(config.defense[0])) == 1 else []
    except ClientFailure as error:
        raise Failure(f"{error}\n{options.resume_hint()}") from error
    columns = None if found else [*KEYS, *BOUNDS]
    write_whole(options.out / "bounds.csv", csv(pd.DataFrame(found, columns=columns), 6).encode())
    gather_rows([config.out for config in runs], options.out)
    note_rows(options.out, "python benchmarks/noise.py", read_rows(options.out))
    NOISE_TABLE.write(options.out)
    console.print(noise_block(options.out), highlight=False, soft_wrap=True)
    console.print(f"table: {options.out}", soft_wrap=True, highlight=False)
