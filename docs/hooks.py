"""What the site needs beyond mkdocs: pictures from results/, reference pages from the registries, and help texts.

A page links to a committed file as `../results/FOLDER/FILE`, which works where the repository is browsed; the site gets
a copy under `results/` and the link to it. In a page, the line `<!-- reference: attacks -->` is replaced by one entry a
registered attack (`defenses` and `objectives` likewise, `columns` by the columns of CSV files), and
`<!-- help: fedmjp.simulate -->` by what `python -m fedmjp.simulate --help` prints.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
RESULT = re.compile(r"\]\(\.\./(results/[^)\s#]+)\)")
REFERENCE = re.compile(r"^<!-- reference: (attacks|defenses|objectives|columns) -->$", re.MULTILINE)
HELP = re.compile(r"^<!-- help: ([\w.]+) -->$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Let the hook import the repository's own packages, wherever mkdocs was started from."""
    sys.path.insert(0, str(ROOT))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file under results/ that a page links to."""
    linked = {
        name
        for file in files.documentation_pages()
        for name in RESULT.findall(Path(file.abs_src_path).read_text("utf-8"))
    }
    for name in sorted(linked):
        if (ROOT / name).is_file():  # a missing one is left to mkdocs' own check of links, which fails the build
            files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the copies, and fill in the reference and the help texts."""
    markdown = RESULT.sub(r"](\1)", markdown)
    markdown = REFERENCE.sub(lambda match: columns() if match[1] == "columns" else reference(match[1]), markdown)
    return HELP.sub(lambda match: f"```text\n{help_text(match[1])}\n```", markdown)


def reference(kind: str) -> str:
    """One entry for each registered attack, defence or objective, in the order of registration: module, then class.

    Args:
        kind: "attacks", "defenses" or "objectives".
    """
    from attacks import ATTACKS  # torch is imported only where a page needs it
    from fedmjp.defenses import DEFENSES, Defense
    from fedmjp.objectives import OBJECTIVES

    registry = {"attacks": ATTACKS, "defenses": DEFENSES, "objectives": OBJECTIVES}[kind]
    entries, documented = [], set()
    for name in registry.names():
        built = registry.get(name)
        entries.append(f"## `{name}` {{ #{name} }}\n")
        if built is Defense:
            entries.append(
                "Sends what it computes: the base class, see [interfaces](interfaces.md#what-a-defence-is).\n"
            )
            continue
        if kind == "attacks":
            needs = ", ".join(f"`{name}`" for name in built.needs_in_words())
            entries.append(f"Needs: {needs or 'nothing beyond the update'}.\n")
        if built.__module__ not in documented:  # a module may hold several
            documented.add(built.__module__)
            entries.append(_entry(built.__module__, (), "show_root_heading: false"))
        options = [field.name for field in dataclasses.fields(built)]
        entries.append(_entry(f"{built.__module__}.{built.__qualname__}", options, "show_root_toc_entry: false"))
    return "\n".join(entries)


def columns() -> str:
    """Tables of the columns of CSV files, with their meanings."""
    from fedmjp.report.columns import COUNTS, KEYS, QUANTITIES, STATISTICS

    heads = {"says what a line is of": KEYS, "counts": COUNTS, "quantity": QUANTITIES, "ending": STATISTICS}
    tables = []
    for head, names in heads.items():
        dash = "_" if names is STATISTICS else ""
        lines = [f"| `{dash}{name}` | {meaning} |" for name, meaning in names.items()]
        tables.append("\n".join([f"| {head} | meaning |", "|---|---|", *lines]))
    return "\n\n".join(tables)


def _entry(name: str, members: Sequence[str], option: str) -> str:
    shown = f"[{', '.join(members)}]" if members else "false"
    return f"::: {name}\n    options:\n      members: {shown}\n      {option}\n"


def help_text(module: str) -> str:
    """What `python -m MODULE --help` prints.

    Raises:
        CalledProcessError: the command failed; the build stops.
    """
    environment = os.environ | {"COLUMNS": "110", "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    return done.stdout.strip()
