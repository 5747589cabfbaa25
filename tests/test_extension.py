"""Another package's attack and defence, installed into a folder: seen everywhere that the built-in ones are.

The two packages under tests/extension/ are what the documentation shows: a module and its metadata each.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ROOT / "tests" / "extension"
# Commands of tables, and the options in which they offer attacks and defences.
TABLES = {
    "april_attack": ("--attacks", "--defense"),
    "mjp_adaptive": ("--defense",),
    "gradient_matching": ("--attacks", "--defense"),
    "federated_tradeoff": ("--attacks", "--defense"),
}


def install(packages: list[Path], target: Path, scratch: Path) -> Path:
    """Install packages with pip, without a network; the folder to put on the path."""
    copies = [shutil.copytree(package, scratch / package.name) for package in packages]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), *map(str, copies)], check=True, capture_output=True, timeout=300)
    return target


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with both packages installed."""
    folder = tmp_path_factory.mktemp("extension")
    return install([PACKAGES / "toy_attack", PACKAGES / "toy_defense"], folder / "site", folder)


def python(site: Path, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """Python with the folder, and this checkout, on its path."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), "COLUMNS": "80"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def flat(text: str) -> str:
    """Help without boxes and line breaks."""
    return re.sub(r"\s+", " ", re.sub(r"[^\S ]|[\u2500-\u257f]", " ", text))


@pytest.mark.parametrize("command", ["simulate", "train"])
def test_help_shows_the_options_of_both(site, command: str) -> None:
    text = flat(python(site, "-m", f"fedmjp.{command}", "--help").stdout)
    assert "--toy.gamma FLOAT Share of the entries of each tensor that are not sent" in text
    assert "--rescale, --no-rescale" in text
    assert re.search(r" --gamma FLOAT Share of patches", text)
    assert re.search(r"Choose from: none, [a-z_, ]*\btoy\b", text)
    if command == "simulate":
        assert re.search(r"Choose from: (auto, all, )?april_optimisation, [a-z_, ]*\btoy\b", text)


@pytest.fixture(scope="module")
def finished(site, tmp_path_factory) -> Path:
    """A run under the toy defence and the toy attack, with options of both."""
    out = tmp_path_factory.mktemp("run") / "out"
    options = ["--data", "photos", "--model", "vit_mini_32", "--clients", "2", "--rounds", "1", "--test-limit", "4"]
    options += ["--defense", "none", "toy", "--toy.gamma", "0.5", "--rescale", "--out", str(out)]
    options += ["--attacks", "patch_embedding", "toy", "--attack-options", "toy.cutoff=1e-13"]
    done = python(site, "-m", "fedmjp.simulate", *options)
    assert done.returncode == 0, done.stderr
    assert "toy" in done.stdout
    return out


def test_rows_name_both_with_their_options(finished) -> None:
    rows = [json.loads(line) for line in (finished / "rows.jsonl").read_text().splitlines()]
    toys = [row for row in rows if row["attack"] == "toy"]
    assert len(toys) == 2 * 2  # defences x clients
    assert {row["defense"] for row in toys} == {"none", "toy"}
    assert all(row["attack_parameters"] == {"cutoff": 1e-13} for row in toys)
    defended = [row for row in rows if row["defense"] == "toy"]
    assert all(row["defense_parameters"] == {"gamma": 0.5, "rescale": True} for row in defended)
    assert min(row["psnr"] for row in toys if row["defense"] == "none") > 40
    assert max(row["psnr"] for row in toys if row["defense"] == "toy") < 30


def test_the_report_shows_both(finished) -> None:
    page = (finished / "report.html").read_text()
    assert len(re.findall(r"<td[^>]*>toy</td>", page)) >= 2
    assert ",toy," in (finished / "summary.csv").read_text()


def test_the_run_resumes_where_the_packages_are_missing_only_with_a_message(finished) -> None:
    options = ["--attacks", "toy", "--out", str(finished), "--resume"]
    gone = python(finished, "-m", "fedmjp.simulate", *options)
    assert gone.returncode == 2
    assert gone.stderr.startswith("error: unknown attack 'toy'; choose from: ")


CONFIGURE = """
import json, tomllib
from pathlib import Path
from flwr.common.config import flatten_dict, fuse_dicts, parse_config_args
from fedmjp.budgets import build_attack
from fedmjp.flower_app import configuration
section = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
asked = parse_config_args(['''{asked}'''])
run = configuration(fuse_dicts(flatten_dict(section), asked), clients=4)
toy, settings = run.defence("toy"), build_attack("toy", run.attack_settings()["toy"]).parameters()
print(json.dumps([run.federation.clients, run.defense, toy.gamma, toy.rescale, run.options.mjp.gamma, settings]))
"""


CONTRACT = """
from attacks import ATTACKS
from tests.attacks import contract
import torch
toy, traits = ATTACKS.get("toy")(), contract.Traits(exact_on=(("standard", torch.float32, 40.0),))
for case in traits.exact_on:
    contract.check_recovers(toy, traits, *case)
for make, stops in contract.OBSTACLES:
    assert stops(traits)
    contract.check_obstacle(toy, make)
contract.check_repeats(toy, traits)
for check in (contract.check_nan, contract.check_many, contract.check_second_table):
    check(toy)
print(ATTACKS.name_of(type(toy)))
"""


@pytest.fixture(scope="module")
def answers(site) -> list[str]:
    """What `CONFIGURE` and `CONTRACT` print, one after the other in one process."""
    asked = 'defense="mjp,toy" gamma=0.2 defense_options="toy.gamma=0.5,rescale=true" attacks="toy"'
    configure = CONFIGURE.format(asked=asked + ' attack_options="toy.cutoff=0.001"')
    done = python(site, "-c", configure + CONTRACT)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_flwr_run_takes_the_options_of_both(answers) -> None:
    assert json.loads(answers[0]) == [4, ["mjp", "toy"], 0.5, True, 0.2, {"cutoff": 0.001}]


def test_the_toy_attack_passes_the_table_of_the_built_in_ones(answers) -> None:
    assert answers[1:] == ["toy"]


@cache
def help_of_table(site: Path, command: str) -> str:
    """The help of a benchmark, on one line."""
    return flat(python(site, f"benchmarks/{command}.py", "--help").stdout)


@pytest.mark.parametrize(
    ("command", "option"), [(command, option) for command, options in TABLES.items() for option in options]
)
def test_tables_offer_both(site, command: str, option: str) -> None:
    helps = re.findall(rf" {option} .*?(?= --[a-z])", help_of_table(site, command))
    assert any(re.search(r"\btoy\b", text) for text in helps), helps


BROKEN = {
    "missing": "import a_package_that_is_not_there\n",
    "damaged": "raise OSError('half a file')\n",
    "empty": "",
    "stranger": "class Thing:\n    pass\n",
}
SAYS = {
    "missing": "cannot be imported: ModuleNotFoundError: No module named 'a_package_",
    "damaged": "cannot be imported: OSError: half a file",
    "empty": "cannot be imported: AttributeError: ",
    "stranger": "is no subclass of ",
}


def plant(folder: Path, name: str, group: str, code: str, package: str = "broken") -> Path:
    """What pip leaves of a package with one entry point."""
    folder.mkdir(exist_ok=True)
    (folder / f"{package}.py").write_text(code)
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {package}:Thing\n")
    return folder


# Command lines, as JSON, one after the other in one process -> exit code, output and errors of each.
COMMANDS = """
import contextlib, io, json, sys
from fedmjp.simulate import main
for arguments in json.loads(sys.argv[1]):
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = stop.code
    print(json.dumps([code, out.getvalue(), errors.getvalue()]))
"""


@pytest.mark.parametrize(("group", "option"), [("fedmjp.attacks", "--attacks"), ("fedmjp.defenses", "--defense")])
def test_a_broken_package_is_an_error_only_when_it_is_asked_for(tmp_path, group: str, option: str) -> None:
    """Four packages that are broken each in its own way."""
    for kind, code in BROKEN.items():
        site = plant(tmp_path / "site", f"{kind}_thing", group, code, f"broken_{kind}")
    out = ["--out", str(tmp_path / "run")]
    asked = [[option, f"{kind}_thing", *out] for kind in BROKEN]
    done = python(site, "-c", COMMANDS, json.dumps([["--help"], ["--rounds", "0", *out], *asked]))
    helped, other, *answers = (json.loads(line) for line in done.stdout.splitlines())
    assert all(f"{kind}_thing" in helped[1] for kind in BROKEN)
    assert "--rounds must be at least 1" in other[2]
    for kind, (code, _, errors) in zip(BROKEN, answers, strict=True):
        assert code == 2
        assert re.match(rf"error: (attack|defense) '{kind}_thing' ", errors)
        assert f"(broken_{kind}:Thing of package broken_{kind}) {SAYS[kind]}" in errors
        assert errors.strip().count("\n") == 0


def test_a_name_that_two_packages_claim_is_refused_with_both(tmp_path) -> None:
    site = plant(tmp_path / "site", "april", "fedmjp.attacks", "class Thing:\n    pass\n")
    done = python(site, "-m", "fedmjp.simulate", "--attacks", "april", "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    claims = "attack 'april' is claimed by attacks.closed_form.april:April and broken:Thing of package broken"
    assert claims in done.stderr
