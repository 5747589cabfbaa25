"""The leaderboard as Markdown: a table, the plane of accuracy and leakage, a card for each submission, and the few
lines of it that the README shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attacks import UsageError
from fedmjp.audit.verdict import Answer
from fedmjp.leaderboard import figure, measure, protocol
from fedmjp.leaderboard.listing import rerun_words, submissions, tier_title
from fedmjp.leaderboard.tiers import TIERS, Tier, tier_called
from fedmjp.records.reasons import grouped
from fedmjp.report.blocks import differing_blocks, markdown_table

COMMON = ("none", "lora", "dp_sgd")  # the README's lines: what people ask for first
NONE = "–"
MEASURED = (
    "images",
    "PSNR, median (dB)",
    "PSNR, worst decile (dB)",
    "SSIM",
    "LPIPS",
    "patches > 25 dB (%)",
    "re-identified (%)",
    "certified (%)",
)
HEADS = (
    "#",
    "defence",
    "answer",
    "strongest attack",
    "tier, model",
    "attacked",
    *MEASURED,
    "accuracy (%)",
    "seconds a step, × none",
    "peak memory, × none",
    "message, × none",
    "attacks that know it",
)
CARD_HEADS = (
    "tier, model",
    "updates",
    "answer",
    "attack",
    *MEASURED,
)
Document = Mapping[str, Any]


def ordered(found: Sequence[Document]) -> list[Document]:
    """Comparable submissions, no defence first, then those whose worst case leaks most.

    Defences that no attack that knows them was run on come last, and so do those that were not run under the whole
    protocol, unless they leak all the same: to be untested is no merit.
    """

    def place(document: Document) -> tuple:
        """Key of the order."""
        settled = tested(document) and not protocol.missing(document)
        undecided = document["worst"]["answer"] != Answer.LEAKS and not settled
        first = document["entry"] == "none"
        return (not first, undecided, measure.severity(worst_result(document)), document["file"])

    return sorted((document for document in found if document["comparable"]), key=place)


def tested(document: Document) -> bool:
    """Whether an attack that knows the defence answered enough images (`measure.ran_enough`) somewhere; true without a
    defence."""
    return document["entry"] == "none" or any(result["worst"]["adaptive_ran"] for result in document["results"])


def answer_of(document: Document) -> str:
    """The answer of the worst case; short of a leak, with what was not run: an attack that knows the defence, and
    federations of the protocol."""
    answer = document["worst"]["answer"]
    if answer == Answer.LEAKS:
        return answer
    lacking = [] if tested(document) or answer == measure.UNTESTED else [measure.UNTESTED]
    lacking += [f"only {attacked(document)} federations"] if protocol.missing(document) else []
    return "; ".join([answer, *lacking])


def worst_result(document: Document) -> Document:
    """The result of the tier and model of the worst case."""
    worst = document["worst"]
    return next(r for r in document["results"] if (r["tier"], r["model"]) == (worst["tier"], worst["model"]))


def title(document: Document) -> str:
    """Heading of a card."""
    return document["name"] + ("" if document["track"] == protocol.COMPARED[0] else f" ({document['track']} track)")


def anchor(document: Document) -> str:
    """The id that the site gives to a card's heading."""
    words = re.sub(r"[^\w\s-]", "", title(document)).strip().lower()
    return re.sub(r"[-\s]+", "-", words)


def leaderboard(folder: Path) -> str:
    """Table, plane and cards of all comparable submissions in a folder.

    Raises:
        UsageError: see `submissions`.
    """
    found = ordered(submissions(folder))
    if not found:
        raise UsageError(f"no submission in {folder} is comparable; run fedmjp-leaderboard add DEFENSE")
    usual = _without_defence(found)
    table = markdown_table(HEADS, [_cells(number, one) for number, one in enumerate(found, 1)])
    tiers = {tier.name: tier.title for tier in TIERS}
    points = [_point(number, one) for number, one in enumerate(found, 1)]
    cards = [_card(one, usual) for one in found]
    parts = [
        '<div id="leaderboard" markdown>',
        table,
        "</div>",
        *_lacking(found),
        rerun_words(found),
        "## Accuracy against leakage",
        figure.plane(points, tiers, _accuracy_interval(usual)),
        figure.SCRIPT,
        "## Cards",
        *cards,
    ]
    return "\n\n".join(parts)


def small(folder: Path) -> str:
    """The submissions of `COMMON` on the small track, in the page's order."""
    found = [document for document in ordered(submissions(folder)) if document["track"] == protocol.COMPARED[0]]
    shown = [document for document in found if document["entry"] in COMMON]
    heads = ["defence", "answer", "strongest attack", "PSNR, median (dB)", "patches > 25 dB", "accuracy"]
    return markdown_table(heads, [_short_cells(document) for document in shown])


def _short_cells(document: Document) -> list[str]:
    line = measure.line_of(worst_result(document))
    leak = [NONE] * 3
    if line is not None:
        leak = [f"`{line['attack']}`", _figure(line["psnr_median"], 1), _percent(line["patches"], 0, " %")]
    return [document["name"], answer_of(document), *leak, f"{document['accuracy']['accuracy']:.0%}"]


def _without_defence(found: Sequence[Document]) -> Document | None:
    return next((one for one in found if one["entry"] == "none" and one["track"] == protocol.COMPARED[0]), None)


def _cells(number: int, document: Document) -> list[str]:
    worst, line, cost = document["worst"], measure.line_of(worst_result(document)), document["cost"]
    leak = [NONE] * 8
    if line is not None:
        share = (_percent(line[name]) for name in ("patches", "reidentified", "certified"))
        digits = {"psnr_median": 1, "psnr_worst": 1, "ssim": 2, "lpips": 2}
        leak = [measure.images_of(line), *(_figure(line[name], n) for name, n in digits.items()), *share]
    return [
        str(number),
        f"[{title(document)}](#{anchor(document)})",
        answer_of(document),
        f"`{worst['attack']}`" if worst["attack"] else NONE,
        f"{tier_title(worst['tier'])}, {worst['model']}",
        attacked(document),
        *leak,
        _percent(document["accuracy"]["accuracy"]),
        _figure(cost["ratio"], 2),
        _figure(cost["peak_bytes"] / cost["peak_bytes_none"], 2),
        _figure(cost["bits"] / cost["bits_none"], 3),
        _some(document["known_by"]) or document["adaptive"] or NONE,
    ]


def _lacking(found: Sequence[Document]) -> list[str]:
    """A sentence on submissions that were not run under the whole protocol; none if there are none."""
    lacking = sum(bool(protocol.missing(document)) for document in found)
    if not lacking:
        return []
    return [
        f"{len(found) - lacking} of the {len(found)} submissions were run under the whole protocol. The others "
        f"({lacking}) lack a part of it, as the column *attacked* says, and come last unless they leak: what they lack "
        "could only add to what they leak."
    ]


def _some(names: Sequence[str], most: int = 2) -> str:
    """The first names; the card has all of them."""
    return ", ".join(f"`{name}`" for name in names[:most]) + (f" and {len(names) - most} more" * (len(names) > most))


def attacked(document: Document) -> str:
    """Federations that a submission was run under, of those of the protocol."""
    defences = [defence["name"] for defence in document["defences"]]
    every = list(protocol.federations(protocol.track_of(document["track"]), document["known_by"], defences))
    return f"{len(every) - len(protocol.missing(document))} of {len(every)}"


def _point(number: int, document: Document) -> dict[str, Any]:
    """A point of the plane: under each tier the result that is worst of its models."""
    places = {"worst": _place(document, worst_result(document))}
    for tier in TIERS:
        own = [result for result in document["results"] if result["tier"] == tier.name]
        if own:
            places[tier.name] = _place(document, measure.worst_of(own))
    accuracy = document["accuracy"]["accuracy"]
    return {"number": number, "link": anchor(document), "accuracy": accuracy, "places": places}


def _place(document: Document, result: Document) -> tuple[float | None, str, str]:
    line = measure.line_of(result)
    tuned = document["accuracy"]
    words = (
        f"{title(document)}: {result['worst']['headline']} ({tier_title(result['tier'])}, {result['model']}); accuracy "
        f"{tuned['accuracy']:.0%} {_accuracy_bounds(tuned)}"
    )
    return (line["psnr_median"] if line else None, result["worst"]["answer"], words)


def _card(document: Document, usual: Document | None) -> str:
    lines = [f"### {title(document)}"]
    if document["picture"]:
        worst = document["worst"]
        caption = f"Originals above, what {worst['attack']} makes of them below ({title(document)})"
        lines.append(f"![{caption}](../results/leaderboard/{document['picture']})")
    lines += [part["paper"] for part in document["defences"] if part["paper"]]
    track = protocol.track_of(document["track"])
    lines.append(markdown_table(CARD_HEADS, [_tier_cells(result, track) for result in document["results"]]))
    lines.append("\n".join(f"- {sentence}" for sentence in _facts(document, usual)))
    return "\n\n".join(lines)


def _tier_cells(result: Document, track: protocol.Track) -> list[str]:
    """A tier and model in a card: the attack that decides, with intervals."""
    line, tier = measure.line_of(result), tier_called(result["tier"])
    prepared = tier.prepared_for(result["worst"]["attack"])
    updates = protocol.layout(tier, track, (), prepared).rounds if prepared else result["updates"]
    cells = [f"{tier.title}, {result['model']}", str(updates), result["worst"]["answer"]]
    if line is None:
        return [*cells, *[NONE] * 9]
    psnr = [_bounded(line, name, 1, 1) for name in ("psnr_median", "psnr_worst")]
    other = [_bounded(line, name, 1, 2) for name in ("ssim", "lpips")]
    shares = [_bounded(line, name, 100, 0) for name in ("patches", "reidentified", "certified")]
    return [*cells, f"`{line['attack']}`", measure.images_of(line), *psnr, *other, *shares]


def _bounded(line: Document, name: str, factor: float, digits: int) -> str:
    """A figure with its interval; one image has none."""
    values = [line[key] for key in (name, f"{name}_low", f"{name}_high")]
    if values[0] is None:
        return NONE
    value, low, high = (f"{factor * part:.{digits}f}" for part in values)
    return value if line["count"] == 1 else f"{value} [{low}, {high}]"


def _facts(document: Document, usual: Document | None) -> list[str]:
    """What a card says beside its table, a sentence a line."""
    worst = document["worst"]
    facts = [f"Worst case, {tier_title(worst['tier'])}, `{worst['model']}`: {worst['headline']}."]
    facts.append(_tried(document))
    if document["entry"] != "none":
        facts.append(_knowledge(document))
    left = [
        f"{', '.join(titles)} ({reason})"
        for reason, titles in grouped({one["title"]: one["reason"] for one in protocol.not_covered(document)}).items()
    ]
    facts += [f"Not attacked: {'; '.join(left)}."] if left else []
    facts += [_worth(document, usual), _cost(document["cost"])]
    made, rerun = document["provenance"], document["rerun"]
    again = (
        "" if rerun is None else f"; {rerun['share']:.0%} of its updates run again here, at commit {rerun['commit']}"
    )
    if rerun is not None and rerun.get("undetermined"):
        again += f" ({rerun['undetermined']} of {rerun['rows']} rows not compared: rounding alone changes them)"
    facts.append(
        f"`{made['command']}`: commit {', '.join(made['commits'])}, {made['device']}, {document['rows']['count']} rows "
        f"(`results/leaderboard/{document['rows']['file']}`){again}."
    )
    return facts


def _worth(document: Document, usual: Document | None) -> str:
    """Accuracy with its interval, and that without a defence."""
    tuned = document["accuracy"]
    beside = "" if usual is None or usual is document else f"; without a defence {usual['accuracy']['accuracy']:.0%}"
    return (
        f"Accuracy {tuned['accuracy']:.0%} {_accuracy_bounds(tuned)} on {tuned['test_images']} test images after "
        f"{tuned['rounds']} rounds (`{tuned['model']}`){beside}."
    )


def _accuracy_bounds(tuned: Document) -> str:
    return f"[{tuned['accuracy_low']:.0%}, {tuned['accuracy_high']:.0%}]"


def _accuracy_interval(usual: Document | None) -> tuple[float, float] | None:
    """Of the accuracy without a defence, shares; None where that was not submitted."""
    return None if usual is None else (usual["accuracy"]["accuracy_low"], usual["accuracy"]["accuracy_high"])


def _cost(cost: Document) -> str:
    """Time, memory and message of a step, beside those without a defence."""
    return (
        f"Cost: {cost['ratio']:.2f} times the seconds of a step without a defence ({cost['repeats']:.0f} of each, in "
        f"turn), at most {cost['peak_bytes'] / 1e6:.0f} MB of tensors beside model and images (without "
        f"{cost['peak_bytes_none'] / 1e6:.0f} MB), {cost['bits'] / 8e6:.2f} MB a message (without "
        f"{cost['bits_none'] / 8e6:.2f} MB)."
    )


def _tried(document: Document) -> str:
    """The attacks whose assumptions held somewhere, and their budget."""
    held = dict.fromkeys(name for result in document["results"] for name in result["worst"]["held"])
    run, search = document["protocol"], document["protocol"]["search"]
    names = ", ".join(f"`{name}`" for name in held) or "none"
    return (
        f"Attacks whose assumptions held: {names}; budget {run['budget']} of one core an update, `{search['attack']}` "
        f"{search['passes']} passes on {search['updates']} update of each model."
    )


def _knowledge(document: Document) -> str:
    """Who knows the defence, and what was tried of it."""
    if not document["known_by"]:
        return "**No adaptive attack:** no registered attack takes this defence into account; one may do better."
    known = ", ".join(f"`{name}`" for name in document["known_by"])
    met = dict.fromkeys(name for result in document["results"] for name in result["worst"]["adaptive_tried"])
    ran = dict.fromkeys(name for result in document["results"] for name in result["worst"]["adaptive_ran"])
    failed = [f"`{name}`{_why_failed(document, name)}" for name in ran if name not in met]
    parts = [f"Attacks that know it: {known}"]
    parts.append("run here on at least half of the images, with their assumptions met: " + _listed(met))
    parts += [f"with an answer, but assumptions that failed on every update: {'; '.join(failed)}"] if failed else []
    return "; ".join(parts) + "."


def _why_failed(document: Document, name: str) -> str:
    """The attack's own reason, of the last tier in which it ran."""
    lines = [line for result in document["results"] for line in result["attacks"] if line["attack"] == name]
    reasons = [line["diagnosis"] for line in lines if line["diagnosis"]]
    return f" ({reasons[-1]})" if reasons else ""


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none of them"


def _figure(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def _percent(value: float | None, digits: int = 0, unit: str = "") -> str:
    return NONE if value is None else f"{100 * value:.{digits}f}{unit}"


def tiers(folder: Path) -> str:
    """The threat tiers, with the capabilities that each grants."""
    heads = ["tier", "the server", "nearest in Carletti et al.", "grants", "attacks"]
    lines = []
    for tier in TIERS:
        grants = ", ".join(f"`{grant.value}`" for grant in tier.grants)
        lines.append([tier.title, tier.meaning, tier.published, grants, _attacks_of(tier)])
    return markdown_table(heads, lines)


def _attacks_of(tier: Tier) -> str:
    """What runs under a tier, in words."""
    named = [f"`{one.attack}`" + (f" (of `{one.defence}`)" if one.defence else "") for one in tier.prepared]
    return ", ".join(named or [f"`{name}`" for name in tier.attacks] + [f"`{protocol.SEARCH}`"] * tier.searched)


BLOCKS: Mapping[str, Callable[[Path], str]] = {
    "leaderboard": leaderboard,
    "leaderboard_small": small,
    "leaderboard_tiers": tiers,
}


def render(results: Path, pages: Sequence[Path]) -> list[str]:
    """Fill the blocks of `BLOCKS` in some pages.

    Returns:
        what was written, "PAGE, block NAME".

    Raises:
        UsageError: no such page, one without a block, or no submission.
    """
    written = []
    for page in pages:
        text = page.read_text(encoding="utf-8") if page.is_file() else ""
        if not any(f"<!-- {name} -->" in text for name in BLOCKS):
            lines = f"<!-- {next(iter(BLOCKS))} --> and <!-- /{next(iter(BLOCKS))} -->"
            raise UsageError(f"{page} is no page with the lines {lines}; pass --pages with one that has them")
        for name, changed in differing_blocks(text, lambda name: BLOCKS[name](results) if name in BLOCKS else None):
            text = changed
            written.append(f"{page}, block {name}")
        page.write_text(text, encoding="utf-8")
    return written
