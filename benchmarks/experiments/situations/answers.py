"""What a user reads as the answer: the verdict and what is said beside it, a one-line error, or a crash.

The same code reads the answers of earlier versions, whose `audit_gradient` returned a bare table and whose pages had
verdicts of another form; hence it imports nothing of the package before a situation has run.
"""

from __future__ import annotations

import html
import io
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REFUSED, CRASHED, TABLE = "refused", "crashed", "no verdict"
OF_THE_MACHINE = ("guesses", "budget")  # findings that say nothing about the situation
CHIPS = {"Leaks.": "leaks", "Undecided.": "undecided", "No leak shown.": "no leak shown"}  # of earlier pages


@dataclass(frozen=True)
class Answer:
    """What a user reads.

    Attributes:
        kind: `REFUSED` (an error of one line), `CRASHED`, `TABLE` (figures without a verdict), or the verdict's word.
        words: the line or lines themselves.
    """

    kind: str
    words: str


def answer_of(ask: Callable[[], Answer]) -> Answer:
    """The answer to one situation, an exception included."""
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            return ask()
    except Exception as error:  # what a user would see as a traceback, or as a UsageError of one line
        kind = REFUSED if type(error).__name__ == "UsageError" else CRASHED
        return Answer(kind, f"{type(error).__name__}: {_line(error)}" if kind == CRASHED else _line(error))


def of_command(arguments: Sequence[str], out: Path) -> Answer:
    """The answer of `python -m fedmjp.simulate` with these arguments, run in this process.

    Args:
        arguments: of the command line, without `--out`.
        out: folder of the run; arguments that name another `--out` never get to write it.
    """
    from fedmjp.simulate import main

    given = [*arguments] if "--out" in arguments else [*arguments, "--out", str(out)]
    errors, argv = io.StringIO(), sys.argv
    try:
        with redirect_stderr(errors):
            code = main(given)
    except SystemExit as stop:
        code = stop.code
    finally:
        sys.argv = argv
    if code:
        lines = [line for line in map(_plain, errors.getvalue().splitlines()) if line]
        said = next((line for line in lines if line.startswith(("error", "Unrecognized", "Invalid"))), lines[-1])
        return Answer(REFUSED if code == 2 else CRASHED, said.removeprefix("error: "))
    return _of_run(out)


def of_audit(result: Any) -> Answer:
    """The answer of `audit_gradient`, of this version or of one that returned a table."""
    if not hasattr(result, "verdict"):
        return Answer(TABLE, _of_table(result))
    noticed = [finding.sentence for finding in result.findings if finding.name not in OF_THE_MACHINE]
    return Answer(str(result.verdict.answer), _joined([result.verdict.headline(), *noticed, *_reasons(result.verdict)]))


def of_watcher(watcher: Any) -> Answer:
    """The answer of a `Watcher` after the app's training, of this version or of one without a verdict."""
    if not hasattr(watcher, "verdict"):
        said = dict.fromkeys(f"`{name}`: {result.diagnosis or 'recovered'}" for _, name, result in watcher.found)
        return Answer(TABLE, _joined(list(said)))
    watcher.finish()
    found = getattr(watcher, "findings", {}).items()
    noticed = [said for name, said in found if name not in OF_THE_MACHINE] + [*watcher.assumptions, *watcher.problems]
    if not watcher.found:
        return Answer(TABLE, _joined(noticed))
    verdict = watcher.verdict()
    return Answer(str(verdict.answer), _joined([verdict.headline(), *noticed, *_reasons(verdict)]))


def _reasons(verdict: Any) -> list[str]:
    """Why attacks failed whose assumptions did not hold on any update."""
    return [f"`{name}`: {reason}" for name, reason in verdict.failed.items()]


def _joined(sentences: Sequence[str]) -> str:
    """Sentences in a row, each once; a first word that is a name in the code keeps its case."""
    named = ((s if "_" in s.split()[0] else s[:1].upper() + s[1:]) for s in dict.fromkeys(sentences))
    return " ".join(f"{s.rstrip('.')}." for s in named)


def _of_table(table: Any) -> str:
    """Mean PSNR and diagnosis of each attack."""
    said = []
    for name, lines in table.groupby("attack", sort=False):
        psnr = lines["psnr"].mean()
        figure = "no image" if psnr != psnr else f"{psnr:.1f} dB"
        said.append(f"`{name}` {figure}, diagnosis: {lines['diagnosis'].iloc[0] or 'none'}")
    return _joined(said)


def _of_run(out: Path) -> Answer:
    """The verdict on each federation of a finished run."""
    try:
        from fedmjp.audit.verdict import judge
    except ImportError:
        return _of_page(out / "report.html")
    from fedmjp.records.rows import load_rows

    rows = load_rows(out / "rows.jsonl")
    verdicts = {name: judge(own) for name, own in rows.groupby("defense", sort=False)}
    kinds = list(dict.fromkeys(str(verdict.answer) for verdict in verdicts.values()))
    words = [
        _joined([f"`{name}`: {v.headline()}" if len(verdicts) > 1 else v.headline(), *_reasons(v)])
        for name, v in verdicts.items()
    ]
    return Answer(" / ".join(kinds), " ".join(words))


def _of_page(page: Path) -> Answer:
    """The verdicts of a page of an earlier version."""
    text = page.read_text(encoding="utf-8")
    found = [
        (CHIPS[html.unescape(chip)], _plain(html.unescape(re.sub(r"<[^>]+>", "", words))))
        for chip, words in re.findall(r'<span class="chip \w+">([^<]*)</span>(.*?)</td>', text, re.DOTALL)
    ]
    if not found:
        return Answer(TABLE, "an empty table and a page without a verdict")
    kinds = list(dict.fromkeys(kind for kind, _ in found))
    return Answer(" / ".join(kinds), " ".join(f"{kind.capitalize()}. {words}" for kind, words in found))


def _line(error: Exception) -> str:
    return _plain(str(error).strip().splitlines()[0] if str(error).strip() else "")


def _plain(text: str) -> str:
    """One line without the frames of a terminal's boxes."""
    return re.sub(r"\s+", " ", re.sub(r"[\u2500-\u257f]|-{5,}", " ", text)).strip()
