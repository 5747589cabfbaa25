"""What commands answer without computing, how much they import for it, and what they say of a wrong installation."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from flwr.common.config import validate_config

import fedmjp
from fedmjp.config import RunConfig
from fedmjp.flower_app import SECTION, configuration, default_config, write_config

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = {"torch", "timm", "torchvision", "pandas", "matplotlib", "flwr", "datasets", "scipy", "skimage"}
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}

# Runs command lines one after the other and prints, as the last line, of each its exit code and what has been imported.
WATCHED = """
import json, runpy, sys
found = []
for sys.argv in {lines!r}:
    code = 0
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=False)
    except SystemExit as stop:
        code = stop.code
    found.append([code, sorted(set(sys.modules) & {heavy!r})])
print("\\n" + json.dumps(found))
"""


@cache
def watched(command: str) -> list[tuple[int, list[str]]]:
    """(exit code, heavy packages imported by then) of every line of `COMMANDS` with this command, in one process."""
    lines = [[name, *options] for name, options, _ in COMMANDS if name == command]
    code = WATCHED.format(lines=lines, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, cwd=ROOT)
    return [tuple(found) for found in json.loads(done.stdout.splitlines()[-1])]


LIGHT = [
    (["--help"], 0),
    (["--version"], 0),
    (["--no-such-option"], 2),
    (["--seed", "many"], 2),
    (["--defense", "mjq"], 2),
    (["--model", "vit_xxl"], 2),
    (["--data", "cifar11"], 2),
    (["--defense", "mjp", "--gamma", "1.5"], 2),
    (["--defense", "noise", "--gamma", "0.5"], 2),  # of a defence that does not run
]
OF_SIMULATE = [
    (["--attacks", "aprill"], 2),
    (["--partition", "sorted"], 2),
    (["--grants", "omniscience"], 2),
    (["--steps", "unmixx=2"], 2),
    (["--attack-options", "dlgg.steps=2"], 2),
    (["--rounds", "0"], 2),
]
COMMANDS = [("fedmjp.train", *case) for case in LIGHT] + [("fedmjp.simulate", *case) for case in LIGHT + OF_SIMULATE]


@pytest.mark.parametrize(("command", "options", "code"), COMMANDS)
def test_answers_without_importing_what_computes(command: str, options: list[str], code: int) -> None:
    place = [line for line in COMMANDS if line[0] == command].index((command, options, code))
    assert watched(command)[place] == (code, [])


def test_version() -> None:
    assert fedmjp.__version__ == PROJECT["project"]["version"]
    done = subprocess.run(
        [sys.executable, "-m", "fedmjp.train", "--version"], capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT
    )
    assert done.stdout == f"fedmjp {fedmjp.__version__}\n"


WITHOUT_FLOWER = """
import sys
for name in ("flwr", "flwr_datasets", "datasets"):
    sys.modules[name] = None
import timm, torch
import attacks, fedmjp.audit
model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, num_classes=5)
image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
names, parameters = zip(*model.named_parameters())
gradients = torch.autograd.grad(torch.nn.functional.cross_entropy(model(image), torch.tensor([1])), parameters)
answer = fedmjp.audit.audit_gradient(model, image, dict(zip(names, gradients)), attacks=["patch_embedding"])
assert answer.table.psnr[2] > 60, answer
from fedmjp import simulate, train
assert simulate.main(["--model", "vit_mini_32", "--out", sys.argv[1]]) == 2
assert train.main(["--model", "vit_mini_32", "--data", "cifar10", "--out", sys.argv[1]]) == 2
try:
    import fedmjp.federation
except ImportError as error:
    print(error, file=sys.stderr)
"""


def test_attacks_and_audit_work_without_flower(tmp_path) -> None:
    command = [sys.executable, "-c", WITHOUT_FLOWER, str(tmp_path / "run")]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    install = "which is not installed: pip install 'fedmjp[federation]'"
    assert done.stderr.splitlines() == [
        f"error: a federation needs the package 'flwr', {install}",
        f"error: data set 'cifar10' needs the package 'datasets', {install}",
        f"a federation needs the package 'flwr', {install}",
    ]


# What an editable installation does: a finder behind Python's own, so that folders in the working directory win.
EDITABLE = """
import sys
from importlib.machinery import PathFinder
from importlib.util import spec_from_file_location

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ("attacks", "fedmjp"):
            folder = f"{root}/{{name}}"
            return spec_from_file_location(name, f"{{folder}}/__init__.py", submodule_search_locations=[folder])

sys.meta_path.insert(sys.meta_path.index(PathFinder) + 1, Finder)
"""


@pytest.mark.parametrize("package", [True, False])
@pytest.mark.parametrize("command", [["-m", "fedmjp.simulate", "--help"], ["-c", "import fedmjp.audit"]])
def test_a_folder_called_attacks_is_named(tmp_path, package: bool, command: list[str]) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(EDITABLE.format(root=ROOT))
    (tmp_path / "attacks").mkdir()
    if package:
        (tmp_path / "attacks" / "__init__.py").write_text("raise RuntimeError('code of the user')\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert re.search(rf"{tmp_path}/attacks\S* hides FedMJP's own package 'attacks'; rename it, or start", done.stderr)
    if command[0] == "-m":
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
    else:
        assert done.stderr.splitlines()[-1].startswith("ImportError: ")


def test_flower_lists_every_option_with_its_default() -> None:
    assert PROJECT["tool"]["flwr"]["app"]["config"] == default_config()
    assert configuration(PROJECT["tool"]["flwr"]["app"]["config"], clients=8) == configuration({}, clients=8)


def test_flower_accepts_the_project_and_finds_both_apps() -> None:
    assert validate_config(PROJECT, check_module=True, project_dir=ROOT) == (True, [], [])


def test_writing_the_options_changes_that_section_only(tmp_path) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    file = tmp_path / "pyproject.toml"
    file.write_text(
        text.replace("rounds = 3", "rounds = 99").replace("positions =", "place =") + "\n[tool.other]\na = 1\n"
    )
    write_config(file)
    assert tomllib.loads(file.read_text()) == PROJECT | {"tool": PROJECT["tool"] | {"other": {"a": 1}}}
    assert file.read_text().startswith(text[: text.index(SECTION)])


def test_flower_options_are_read_as_their_types() -> None:
    found = configuration({"train_limit": "", "rounds": 5, "gamma": 0.5, "at_most": 2, "resume": True}, clients=3)
    assert (found.federation.rounds, found.federation.clients, found.data.train_limit) == (5, 3, None)
    assert (found.options.mjp.gamma, found.audit.at_most, found.resume) == (0.5, ("2",), True)
    assert found.model.weights == RunConfig().model.weights


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"roundz": 3}, "unknown option 'roundz'; choose from: "),
        ({"rounds": "three"}, "option rounds takes a whole number, not 'three'"),
        ({"update": "noise"}, "option update takes one of gradient, weights, not 'noise'"),
        ({"defense_options": "gamma"}, "defense_options takes OPTION=value"),
        ({"defense_options": "toy.gamma=1"}, "unknown option 'toy.gamma'"),
        ({"defense": "none", "gamma": 0.5}, "--gamma is an option of --defense mjp, which does not run"),
    ],
)
def test_mistakes_in_flower_options(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        configuration(options, clients=2)
