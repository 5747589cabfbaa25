"""The rooms of the house: who imports whom, read from the sources, and no circle among them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def imported(file: Path) -> Iterator[str]:
    """Names of modules that a file imports when it is imported itself."""
    waiting: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif not isinstance(node, (ast.FunctionDef, ast.Lambda)) and not _types_alone(node):
            waiting += ast.iter_child_nodes(node)


def _types_alone(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def rooms_of(package: str) -> dict[str, set[str]]:
    """Room (a folder of the package, or "" for the files beside them) -> the other folders that it imports from."""
    folders = {path.name for path in (ROOT / package).iterdir() if (path / "__init__.py").is_file()}
    found: dict[str, set[str]] = {folder: set() for folder in folders}
    for folder in folders:
        for file in (ROOT / package / folder).rglob("*.py"):
            parts = [name.split(".") for name in imported(file)]
            found[folder] |= {p[1] for p in parts if p[0] == package and len(p) > 1 and p[1] in folders - {folder}}
    return found


@pytest.mark.parametrize("package", ["attacks", "fedmjp"])
def test_rooms_import_each_other_in_one_direction(package: str) -> None:
    rooms = rooms_of(package)
    assert len(rooms) > 5
    list(TopologicalSorter(rooms).static_order())  # raises CycleError, which names the circle


def test_the_adversary_never_imports_the_federation() -> None:
    for file in (ROOT / "attacks").rglob("*.py"):
        assert not {name.split(".")[0] for name in imported(file)} & {"fedmjp", "flwr"}, file
