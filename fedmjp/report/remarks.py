"""What a reader has to know beside the numbers: verdicts, diagnoses, attacks that were not run, warnings.

Terminal and page print the same; each is computed here once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from fedmjp.audit.strongest import IMAGE
from fedmjp.audit.verdict import Answer, Verdict, judge
from fedmjp.metrics import psnr_in_words
from fedmjp.records.failures import LEFT_OUT
from fedmjp.records.reasons import in_one_sentence, pattern
from fedmjp.records.rows import ANY_PLACE, BASELINES
from fedmjp.report.flags import footnotes, with_table_flags
from fedmjp.report.grouping import each_group
from fedmjp.report.tables import GROUP
from fedmjp.report.words import defence_words, number_of

Place = tuple[str, str, str]  # model, block, defence
# What `judge` reads of a row.
JUDGED = (*IMAGE, "attack", "defense", "defense_parameters", "threat_model", "psnr", "patch_recovery", "known")
JUDGED += (ANY_PLACE, "certified", "residual", "diagnosis", "flags")
# The colour of an answer. Neither "no leak shown" nor "not tested" is good news, so none is green.
COLOURS = {Answer.LEAKS: "red", Answer.PARTLY: "dark_orange", Answer.NOT_SHOWN: "grey58", Answer.NOT_TESTED: "grey58"}


def verdicts(rows: pd.DataFrame, run: Mapping[str, Any]) -> dict[Place, Verdict]:
    """The verdict on every (model, block, defence) of a run.

    Args:
        rows: as `load_rows` gives them.
        run: content of run.json, whose `not_run` says by defence which registered attacks did not run and why.
    """
    not_run = run.get("not_run") or {}
    return {
        place: judge(group, not_run.get(place[2], {}))
        for place, group in each_group(rows, ["model", "block", "defense"], JUDGED)
    }


def as_headlines(found: Mapping[Place, Verdict]) -> list[Text]:
    """Each verdict's headline as one line for a terminal, the answer in its colour."""
    lines = []
    for place, title in titles(found).items():
        verdict = found[place]
        rest = verdict.headline().removeprefix(str(verdict.answer))
        lines.append(
            Text.assemble((f"{title}: ", "bold"), (str(verdict.answer), f"bold {COLOURS[verdict.answer]}"), rest)
        )
    return lines


def titles(places: Mapping[Place, Any]) -> dict[Place, str]:
    """A title for each place: its defence in words, with model and block where they differ."""
    several = len({place[:2] for place in places}) > len({place[2] for place in places}) or any(
        len({p[:2] for p in places if p[2] == place[2]}) > 1 for place in places
    )
    return {p: defence_words(p[2]) + (f" ({p[0]}, {p[1]} block)" if several else "") for p in places}


def diagnoses(rows: pd.DataFrame) -> list[dict[str, str]]:
    """Each diagnosis once: its defences in words, the attack, in how many rows of these, and the sentence.

    Diagnoses that differ only in numbers are one, and so are those of one attack under several defences.
    """
    texts = rows["diagnosis"].astype(object)
    own = rows.loc[texts.notna() & (texts != ""), ["defense", "attack"]].astype(object)
    own = own.assign(diagnosis=texts.loc[own.index])
    totals = rows.groupby(["defense", "attack"], observed=True).size()
    lines = []
    for (attack, _), group in each_group(own.assign(pattern=_patterns(own["diagnosis"])), ["attack", "pattern"]):
        defences = list(dict.fromkeys(group["defense"]))
        lines.append(
            {
                "defense": "; ".join(map(defence_words, defences)),
                "attack": attack,
                "count": f"{len(group)} of {sum(totals[d, attack] for d in defences)}",
                "diagnosis": in_one_sentence(dict.fromkeys(group["diagnosis"])),
            }
        )
    return lines


def _patterns(texts: pd.Series) -> list[str]:
    """The pattern of each text, of equal texts computed once."""
    known = {text: pattern(text) for text in dict.fromkeys(texts)}
    return [known[text] for text in texts]


def not_run(found: Mapping[Place, Verdict]) -> list[dict[str, str]]:
    """Each reason why registered attacks were not run once: the attacks, their defences in words, the reason."""
    by_attack: dict[tuple[str, str], tuple[list[str], list[str]]] = {}  # (attack, pattern) -> defences, reasons
    for place, verdict in found.items():
        for attack, reason in verdict.not_run.items():
            defences, texts = by_attack.setdefault((attack, pattern(reason)), ([], []))
            defences.append(defence_words(place[2]))
            texts.append(reason)
    together: dict[tuple[str, str], tuple[list[str], list[str]]] = {}  # (pattern, defences) -> attacks, reasons
    for (attack, shape), (defences, texts) in by_attack.items():
        attacks, every = together.setdefault((shape, "; ".join(dict.fromkeys(defences))), ([], []))
        attacks.append(attack)
        every += texts
    return [
        {"attacks": ", ".join(attacks), "defense": defences, "reason": in_one_sentence(texts)}
        for (_, defences), (attacks, texts) in together.items()
    ]


def notes(rows: pd.DataFrame) -> list[str]:
    """Remarks under the verdicts: metrics that were not computed, few images, and every flag in words."""
    found = []
    scored = rows["mse"].notna()
    if not scored.any():
        return found
    if rows["lpips"][scored].isna().all():
        found.append("LPIPS was not computed: the weights of its network were not available.")
    images = rows.loc[scored, list(GROUP)].groupby(list(GROUP), observed=True).size().min()
    if images < 10:
        words = number_of(images, "image")
        found.append(f"Some means are over {words} only; intervals over so few are too narrow, and one image has none.")
    return found + [f"Warning, {line}." for line in footnotes(with_table_flags(rows))]


def noticed(run: Mapping[str, Any], failures: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """What was noticed about the updates of each defence, from run.json; one sentence a finding and its defences.

    Last come updates that are missing, because clients failed or their replies were refused, and attacks that were
    given up.

    Args:
        run: content of run.json. What a Watcher could not audit is among its notes.
        failures: rows of failures.jsonl.
    """
    together: dict[str, list[str]] = {}
    for defense, own in (run.get("findings") or {}).items():
        for sentence in own.values():
            together.setdefault(sentence, []).append(defence_words(defense))
    found = [f"{'; '.join(defences)}: {sentence}." for sentence, defences in together.items()]
    found += [
        f"{defence_words(failure['defense'])}: in round {failure['round']}, client {failure['client']} "
        f"{failure['reason']}; its update is in no mean and was not attacked."
        for failure in failures
        if failure["status"] == LEFT_OUT
    ]
    return found + [
        f"{defence_words(one['defense'])}: in round {one['round']}, client {one['client']}'s update was not attacked "
        f"by {', '.join(one['attacks'])} ({one['reason']})."
        for one in run.get("not_attacked") or []
    ]


def as_terminal_lines(
    rows: pd.DataFrame,
    found: Mapping[Place, Verdict],
    run: Mapping[str, Any],
    failures: Sequence[Mapping[str, Any]] = (),
) -> list[RenderableType]:
    """Diagnoses, attacks not run and notes, as lines for below the table of a terminal.

    Args:
        run: content of run.json.
        failures: rows of failures.jsonl.
    """
    everywhere = "; ".join(dict.fromkeys(defence_words(place[2]) for place in found))

    def under(line: Mapping[str, str], words: str) -> str:
        """The words, behind the defences that they are about unless that is all."""
        return words if line["defense"] == everywhere else f"{line['defense']}: {words}"

    parts = {
        "Diagnoses (a poor score in such a row says nothing for the defence)": [
            under(line, f"{line['attack']}, {line['count']} rows: {line['diagnosis']}") for line in diagnoses(rows)
        ],
        "Registered attacks that were not run": [
            under(line, f"{line['attacks']}: {line['reason']}") for line in not_run(found)
        ],
        "Notes": [*noticed(run, failures), *notes(rows)],
    }
    lines: list[RenderableType] = []
    for heading, items in parts.items():
        lines += [Text(f"\n{heading}", "bold"), *(Padding(Text(item), (0, 0, 0, 2)) for item in items)] if items else []
    return lines


def picture_words(rows: pd.DataFrame) -> str:
    """What can be seen in a picture of reconstructions: for each defence the attack with the highest PSNR."""
    attacked = rows.loc[~rows["attack"].isin(BASELINES), ["defense", "attack", "psnr"]]
    parts = []
    for (defense,), group in each_group(attacked, ["defense"]):
        if group["psnr"].isna().all():
            parts.append(f"{defence_words(defense)}: no attack has a score")
            continue
        best = group.loc[group["psnr"].idxmax()]
        parts.append(f"{defence_words(defense)}: {best['attack']} reaches {psnr_in_words(best['psnr'])} at best")
    return "; ".join(parts)
