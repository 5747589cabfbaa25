"""A loop over rooms: what each renders, compared with what is committed or written over it."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

import experiments
from attacks.registry import UsageError
from experiments.pages.options import Options
from experiments.rendering import Rendering
from experiments.scaffold import Failure
from fedmjp.report.blocks import differing_blocks


@dataclass(frozen=True)
class Difference:
    """A file whose content is not what the results give.

    Attributes:
        path: of the file.
        content: what it should hold.
        what: the file, or its Markdown block, in words.
    """

    path: Path
    content: str
    what: str


def renderings() -> list[Rendering]:
    """What all rooms render: `RENDERINGS` of every `experiments.ROOM.render`."""
    rooms = (
        f"experiments.{module.name}.render" for module in pkgutil.iter_modules(experiments.__path__) if module.ispkg
    )
    return [one for room in rooms if find_spec(room) for one in import_module(room).RENDERINGS]


def differing_files(root: Path, every: Sequence[Rendering]) -> Iterator[Difference]:
    """Files in results/ that are not what their rows give.

    Raises:
        UsageError: a results folder is missing.
    """
    for one in every:
        folder = root / "results" / one.folder
        if not folder.is_dir():
            raise UsageError(f"no folder {folder}; run the command that writes it, or pass another --root")
        for name, content in one.files(folder).items():
            path = folder / name
            if not path.is_file() or path.read_bytes() != content.encode():
                yield Difference(path, content, f"results/{one.folder}/{name}")


def differing_pages(root: Path, every: Sequence[Rendering]) -> Iterator[Difference]:
    """Pages with blocks that are not what the results give, each page once for each such block.

    Raises:
        UsageError: a block of a name that no room registers.
    """
    blocks = {name: (make, root / "results" / one.folder) for one in every for name, make in one.blocks.items()}
    for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8") if page.is_file() else ""
        for name, changed in differing_blocks(text, partial(_content, page, blocks)):
            yield Difference(page, changed, f"{page.relative_to(root)}, block {name}")


def _content(page: Path, blocks: Mapping[str, tuple[Callable[[Path], str], Path]], name: str) -> str:
    if name not in blocks:
        raise UsageError(f"{page}: no room of benchmarks/experiments renders a block called {name!r}")
    make, folder = blocks[name]
    return make(folder)


def run(options: Options, console: Console) -> None:
    """Compare, or write.

    Raises:
        Failure: something differs, and `--check` is given.
    """
    every, found = renderings(), []
    # Files first: blocks are made from them.
    for differing in (differing_files, differing_pages):
        for one in differing(options.root, every):
            found.append(one.what)
            if not options.check:
                one.path.write_text(one.content, encoding="utf-8")
                console.print(f"written: {one.what}", highlight=False)
    if options.check and found:
        raise Failure("\n".join(["these differ from the committed results; run python benchmarks/render.py:", *found]))
    if options.figures and not options.check:
        for one in every:
            one.figures(options.root / "results" / one.folder)
    console.print(f"{len(found)} differed" if found else "nothing differs", highlight=False)
