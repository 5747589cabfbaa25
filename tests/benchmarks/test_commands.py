"""Every benchmark command: its help, its protocol, and what it imports before its options are read."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
COMMANDS = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
# Mistakes that are found before anything is computed.
TYPOS = {
    "april_attack": ["--attacks", "aprill"],
    "mjp_adaptive": ["--attacks", "april", "subspace"],
    "gradient_matching": ["--defense", "mpj"],
    "federated_tradeoff": ["--attacks", "dgl"],
    "batch_rounds": ["--batch-sizes", "4"],
    "corruptions": ["--corruptions", "rain"],
    "speed": ["--images", "0"],
    "mjp_overhead": ["--steps", "0"],
    "training_speed": ["--models", "swin_t", "--image-sizes", "224", "--batch-sizes", "4"],
}
LIGHT = """
import contextlib, io, sys
from importlib import import_module
heavy = {"torch", "pandas", "matplotlib", "timm"}
import fedmjp.config
if "torch" in sys.modules:
    sys.exit(77)
for name, arguments in CALLS:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = import_module(name).main(arguments)
        except SystemExit as stop:
            code = stop.code
    assert code == (0 if arguments == ["--help"] else 2), (name, arguments, code)
    assert not heavy & set(sys.modules), (name, arguments, heavy & set(sys.modules))
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_the_command_and_what_it_is_for(name: str, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        import_module(name).main(["--help"])
    assert not stop.value.code
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python benchmarks/{name}.py")
    assert len(text.splitlines()) > 10


def test_help_and_mistakes_are_answered_without_torch() -> None:
    calls = [(name, ["--help"]) for name in COMMANDS] + [(n, a) for n, a in TYPOS.items()]
    calls += [(name, ["--no-such-option"]) for name in COMMANDS]
    path = os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent)])
    done = subprocess.run(
        [sys.executable, "-c", LIGHT.replace("CALLS", repr(calls))],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode == 77:
        pytest.skip("fedmjp.config itself imports torch")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [n for n in COMMANDS if n in TYPOS])
def test_mistakes_are_one_line_and_code_2(name: str, capsys) -> None:
    assert import_module(name).main(TYPOS[name]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("error: ")
    assert complaint.count("\n") == 1


def test_a_list_of_strengths_and_one_strength_exclude_each_other(tmp_path, capsys) -> None:
    for name in ("mjp_adaptive", "gradient_matching", "federated_tradeoff"):
        assert import_module(name).main(["--gamma", "0.3", "--out", str(tmp_path / name)]) == 2
        assert "takes --gammas, a run for each value, and no --gamma" in capsys.readouterr().err
