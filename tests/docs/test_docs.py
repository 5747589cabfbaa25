"""README and documentation against the code: links, commands, options, names, examples and figures."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import timm
import torch
import yaml

from attacks import ATTACKS, Observation
from fedmjp.defenses import DEFENSES
from fedmjp.objectives import OBJECTIVES
from fedmjp.report.columns import COUNTS, KEYS, QUANTITIES, STATISTICS
from tests.attacks.models import timm_vit
from tests.conftest import photographs

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
# Here the rows' `setting` is the schedule of the updates; elsewhere it is what a reconstruction is compared with.
SCHEDULED = ("mjp_adaptive", "mjp_adaptive_trained", "mjp_adaptive_long", "withheld")

COMMAND = re.compile(r"(?<!``)python (-m )?([\w./]+)((?: [^\s#`|]+)*)")
BLOCK = re.compile(r"<!-- (\w+) -->.*?<!-- /\1 -->", re.DOTALL)
PYTHON = re.compile(r"^```python.*?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def commands() -> list[tuple[str, bool, str, tuple[str, ...]]]:
    """(page, whether it is `python -m`, module or script, options) of every command shown."""
    found = []
    for page in PAGES:
        for module, target, rest in COMMAND.findall(text_of(page)):
            options = (word.split("=")[0] for word in rest.split() if word.startswith("--"))
            found.append((name_of(page), bool(module), target, tuple(options)))
    return found


@cache
def hooks() -> ModuleType:
    """docs/hooks.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options_of(help_text: str) -> set[str]:
    return set(re.findall(r"--[a-z][\w.-]*", help_text))


@cache
def module_options(module: str) -> set[str]:
    return options_of(hooks().help_text(module))


def test_readme_is_one_page() -> None:
    assert len(text_of(README).splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_and_pictures_exist(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)\s]+)\)", prose)
    missing = [
        link
        for link in links
        if not re.match(r"\w+:", link) and not (page.parent / link.partition("#")[0]).resolve().exists()
    ]
    assert not missing


def test_pages_link_to_sections_that_exist() -> None:
    """Of the pages themselves mkdocs checks it; it does not read README.md and CONTRIBUTING.md."""
    for page in (README, ROOT / "CONTRIBUTING.md"):
        for target, section in re.findall(r"\]\((docs/[\w-]+\.md)#([\w-]+)\)", text_of(page)):
            heads = re.findall(r"^#+ (.*)$", text_of(ROOT / target), re.MULTILINE)
            assert section in [re.sub(r"[^\w\s-]", "", head).strip().lower().replace(" ", "-") for head in heads]


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == [page.name for page in DOCS]


@pytest.mark.parametrize(("module", "target"), sorted({(m, t) for _, m, t, _ in commands()}))
def test_commands_exist(module: bool, target: str) -> None:
    assert importlib.util.find_spec(target) if module else (ROOT / target).is_file()


TARGETS = sorted(
    {name for page in PAGES for name in re.findall(r"(?:`|^    )make ([\w-]+)", text_of(page), re.MULTILINE)}
)


@pytest.mark.parametrize("name", TARGETS)
def test_make_targets_exist(name: str) -> None:
    assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


MODULE_OPTIONS = sorted({(target, option) for _, module, target, options in commands() if module for option in options})


@pytest.mark.parametrize(
    ("module", "option"),
    MODULE_OPTIONS,
)
def test_options_of_modules_exist(module: str, option: str) -> None:
    assert option in module_options(module)


SCRIPTS = sorted({target for _, module, target, options in commands() if not module and options})


@pytest.mark.parametrize("script", SCRIPTS)
def test_options_of_scripts_exist(script: str, monkeypatch, capsys) -> None:
    """Each script as `python SCRIPT --help` runs it, in this process."""
    shown = {option for _, _, target, options in commands() if target == script for option in options}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(script, run_name="__main__")
    assert not stop.value.code
    assert shown <= options_of(capsys.readouterr().out)


def test_a_script_runs_in_a_process_of_its_own() -> None:
    subprocess.run([sys.executable, SCRIPTS[0], "--help"], cwd=ROOT, check=True, capture_output=True)


def table_names(page: str) -> dict[str, str]:
    """Names in the first column of the page's first table of names -> last cell of their row."""
    found = {}
    for line in text_of(ROOT / "docs" / page).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            found |= {name: cells[-1] for name in re.findall(r"`(\w+)`", cells[0])}
    return found


def test_every_attack_is_listed_with_what_it_needs() -> None:
    listed = table_names("attacks.md")
    assert set(listed) == set(ATTACKS.names())
    for name, cell in listed.items():
        cells = {need.strip().replace(" ", "_").replace("_or_", " or ") for need in cell.split(",")}
        assert cells == set(ATTACKS.get(name).needs_in_words())


def test_every_defence_is_listed() -> None:
    assert set(table_names("defenses.md")) == set(DEFENSES.names())


def test_every_objective_is_listed() -> None:
    assert list(table_names("objectives.md"))[: len(OBJECTIVES.names())] == OBJECTIVES.names()


@pytest.mark.parametrize(
    ("kind", "registry"), [("attacks", ATTACKS), ("defenses", DEFENSES), ("objectives", OBJECTIVES)]
)
def test_reference_is_made_from_the_registry(kind: str, registry) -> None:
    assert f"<!-- reference: {kind} -->" in text_of(ROOT / "docs" / f"{kind}.md")
    page = hooks().reference(kind)
    assert re.findall(r"^## `(\w+)`", page, re.MULTILINE) == registry.names()


def test_the_page_lists_every_column_of_csv_files() -> None:
    assert "<!-- reference: columns -->" in text_of(ROOT / "docs" / "interfaces.md")
    page = hooks().columns()
    assert "| `psnr` | " in page
    assert set(re.findall(r"^\| `(\w+)` ", page, re.MULTILINE)) == {
        *(*KEYS, *COUNTS, *QUANTITIES),
        *(f"_{name}" for name in STATISTICS),
    }


def test_findings_are_figures_of_generated_tables() -> None:
    readme = text_of(README)
    findings = readme[readme.index("## Four findings") : readme.index("## Threat model")]
    tables = "".join(match[0] for page in PAGES for match in BLOCK.finditer(text_of(page)))
    figures = re.findall(r"\d+\.\d+", findings)
    assert len(figures) > 10
    known = set(re.findall(r"\d+\.\d+", tables))
    assert [figure for figure in figures if figure not in known] == []


def recorded_minutes(folder: Path) -> float:
    """Minutes that the rows of a results folder record for attacks, or for trainings, each of them counted once.

    Of situations, which have no rows, those that run.json records for the column now.
    """
    if folder.name == "situations":
        return sum(json.loads((folder / "run.json").read_text(encoding="utf-8"))["now"]["seconds"].values()) / 60
    packed = folder / "rows.jsonl.gz"
    runs: dict[str, float] = {}
    keys = "image_id model weights block defense defense_parameters precision batch_size seed attack attack_parameters"
    keys += " round client threat_model gamma measured clients log_rows" + (
        " setting" if folder.name in SCHEDULED else ""
    )
    lines = gzip.decompress(packed.read_bytes()) if packed.exists() else (folder / "rows.jsonl").read_bytes()
    for row in map(json.loads, lines.splitlines()):
        if "train_seconds" in row:
            runs[row["training"]] = row["train_seconds"]
        elif row.get("image", 0) == 0 and row["seconds"]:  # a batch is one run; its images share the seconds
            key = json.dumps([row.get(k) for k in keys.split()], sort_keys=True)
            runs[key] = max(runs.get(key, 0.0), row["seconds"])
    return sum(runs.values()) / 60


def test_minutes_are_those_that_rows_and_run_json_record() -> None:
    lines = re.findall(r"`(results/\S+)` \| ([\d.]+) \|$", text_of(ROOT / "docs" / "reproduce.md"), re.MULTILINE)
    assert len(lines) == 37
    for folder, minutes in lines:
        assert float(minutes) == pytest.approx(recorded_minutes(ROOT / folder), rel=0.05, abs=0.5), folder


def test_readme_audit_runs(capsys) -> None:
    """The lines under "Audit your own model"."""
    code = PYTHON.findall(text_of(README))[0]
    assert len([line for line in code.splitlines() if line]) == 5
    torch.manual_seed(0)
    # At 224 pixels, where no search fits the budget.
    model, images = timm.create_model("deit_tiny_patch16_224", num_classes=5), photographs(224, 1)
    exec(code, {"torch": torch, "model": model, "images": images, "labels": torch.tensor([1])})
    assert "patch_embedding" in capsys.readouterr().out


def test_audit_page_runs(capsys) -> None:
    """The first examples of docs/audit.md, one after the other."""
    names: dict[str, object] = {}
    for block in PYTHON.findall(text_of(ROOT / "docs" / "audit.md"))[:2]:
        exec(block, names)
        lines = re.findall(r"^ *patch_embedding +0 ", capsys.readouterr().out, re.MULTILINE)
        assert len(lines) == 1


def toy_module(name: str, folder: Path, monkeypatch) -> ModuleType:
    """The module `name` that docs/extending.md shows."""
    page = text_of(ROOT / "docs" / "extending.md")
    code = re.search(rf'^```python title="{name}.py"\n(.*?)^```$', page, re.DOTALL | re.MULTILINE)[1]
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    return __import__(name)


def test_toy_attack_of_the_guide_works(tmp_path, monkeypatch) -> None:
    toy, model = toy_module("fedmjp_grey", tmp_path, monkeypatch), timm_vit()
    gradients = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    observation = Observation(gradients, model, 2, (3, 32, 32), (0.5,) * 3, (0.5,) * 3)
    found = toy.Grey(level=0.25)([observation])
    assert found.images.shape == (2, 3, 32, 32)
    assert float(found.images.mean()) == 0.25
    assert found.diagnosis == "a guess"
    assert toy.Grey(level=2.0)([observation]).diagnosis == "level must lie in [0, 1], not 2.0"


def test_toy_defence_of_the_guide_works(tmp_path, monkeypatch) -> None:
    toy = toy_module("fedmjp_sign", tmp_path, monkeypatch)
    sent = toy.SignUpdate(magnitude=0.5).on_update({"w": torch.tensor([-2.0, 0.0, 3.0])}, torch.Generator())
    assert sent["w"].tolist() == [-0.5, 0.0, 0.5]
    with pytest.raises(ValueError, match="--magnitude must be positive"):
        toy.SignUpdate(magnitude=0.0).validate()


def test_metadata_of_the_guide_names_the_toys() -> None:
    files = re.findall(
        r'^```toml title="pyproject.toml"\n(.*?)^```$', text_of(ROOT / "docs" / "extending.md"), re.S | re.M
    )
    points = {}
    for text in files:
        points |= tomllib.loads(text)["project"]["entry-points"]
    assert points == {
        "fedmjp.attacks": {"grey": "fedmjp_grey:Grey"},
        "fedmjp.defenses": {"sign": "fedmjp_sign:SignUpdate"},
    }


def test_citation_has_the_version_and_licence_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (str(citation["version"]), citation["license"]) == (project["version"], project["license"])
    assert {"cff-version", "message", "title", "type", "authors"} <= set(citation)


@pytest.mark.parametrize("package", ["attacks", "fedmjp"])
def test_packages_ship_their_type_information(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
    assert re.search(rf"^{package} = py.typed$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)


def built_site(folder: Path) -> Path:
    """The site that `make docs` has built since the last change of anything in it, else a new one in `folder`."""
    built, parts = ROOT / "site", ("docs", "attacks", "fedmjp", "benchmarks", "results")
    shown = [
        ROOT / "mkdocs.yml",
        *(path for part in parts for path in (ROOT / part).rglob("*") if path.suffix != ".pyc"),
    ]
    if (built / "index.html").is_file():
        made = (built / "index.html").stat().st_mtime
        if made > max(path.stat().st_mtime for path in shown if path.is_file()):
            return built
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_site_builds_strictly_and_requests_nothing_from_elsewhere(tmp_path) -> None:
    site = built_site(tmp_path)
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(DOCS)
    for page in pages:
        html = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source|video)\b[^>]*?\bsrc=[\"']?([^\"'\s>]+)", html)
        loaded += re.findall(r"<link\b[^>]*?\bhref=[\"']?([^\"'\s>]+)", html)
        assert loaded
        assert not [url for url in loaded if re.match(r"(\w+:)?//", url)], page
    pictures = re.findall(r"<img[^>]*src=[\"']?([^\"'\s>]+)", (site / "adaptive" / "index.html").read_text("utf-8"))
    assert len(pictures) >= 4
    assert all((site / "adaptive" / url).resolve().is_file() for url in pictures)
