"""Rounds and reports of growing size, a process each; the protocol stands in `options.Options`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from experiments.scaffold import RESULTS
from experiments.scale.logs import write_log
from experiments.scale.options import Options
from experiments.scale.render import SCALE, SCHEMA
from experiments.scale.works import audit_clients, render_report, train_round
from experiments.session import Session
from experiments.speed.timing import alone
from fedmjp.records.rows import RowLog


def run(options: Options, console: Console) -> None:
    """Measure what is missing, then write and print the table."""
    session = Session(options, console, SCHEMA)
    with session.rows() as rows:
        for clients in options.clients:
            _measure_round(options, clients, session, rows)
        for clients in options.audited:
            _measure_audit(options, clients, session, rows)
        for count in options.log_rows:
            _measure_report(options, count, session, rows)
    session.finish("python benchmarks/scale.py", SCALE)
    console.print(pd.read_csv(options.out / "table.csv").to_string(index=False), highlight=False)


def _measure_round(options: Options, clients: int, session: Session, rows: RowLog) -> None:
    case = {"measured": "round", "model": options.model, "dataset": options.data, "clients": clients, "log_rows": 0}
    _append(case, lambda: alone(train_round, _federation(options, options.model, clients)), session, rows)


def _measure_audit(options: Options, clients: int, session: Session, rows: RowLog) -> None:
    flat = _federation(options, options.audit_model, clients)
    flat |= {"audit_clients": ",".join(map(str, range(clients))), "attacks": "patch_embedding"}

    def work() -> dict[str, float | None]:
        """Audit into a folder that is then dropped."""
        with tempfile.TemporaryDirectory(dir=options.out) as folder:
            return alone(audit_clients, flat | {"out": folder})

    case = {"measured": "audit", "model": options.audit_model, "dataset": options.data, "clients": clients}
    _append(case | {"log_rows": 0}, work, session, rows)


def _federation(options: Options, model: str, clients: int) -> dict[str, Any]:
    """Options of one round in which each client has a batch of one image."""
    flat = {"model": model, "data": options.data, "clients": clients, "batch_size": 1, "rounds": 1}
    return flat | {"threads": options.threads} | ({"data_path": str(options.data_path)} if options.data_path else {})


def _measure_report(options: Options, count: int, session: Session, rows: RowLog) -> None:
    def work() -> dict[str, float | None]:
        """Write a log and have its report made in a folder that is then dropped."""
        with tempfile.TemporaryDirectory(dir=options.out) as folder:
            write_log(RESULTS / "simulate", Path(folder), count)
            return alone(render_report, Path(folder))

    case = {"measured": "report", "model": "", "dataset": "", "clients": 0, "log_rows": count}
    _append(case, work, session, rows)


def _append(case: dict[str, Any], work: Callable[[], dict[str, float | None]], session: Session, rows: RowLog) -> None:
    whole = {**session.columns, "weights": "random, NOT TRAINED" if case["model"] else "", "seed": 0, **case}
    if rows.has(whole):
        return
    found = work()
    rows.append({**whole, **found})
    size = f"{case['clients']} clients" if case["clients"] else f"{case['log_rows']} rows"
    session.say(
        f"{case['measured']} of {size}: {found['seconds']:.1f} s ({found['cpu_seconds']:.1f} s of a core), "
        f"{found['process_mib']:.0f} MiB at most, {found['process_mib'] - found['before_mib']:.0f} MiB more than before"
    )
