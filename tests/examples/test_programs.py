"""The example programs and the notebook run as they stand, without a network."""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(program: str, monkeypatch: pytest.MonkeyPatch, *options: object) -> None:
    """A program, in this process: another would import all libraries anew."""
    path = str(EXAMPLES / program)
    monkeypatch.setattr(sys, "argv", [path, *map(str, options)])
    runpy.run_path(path, run_name="__main__")


def page_of(said: str) -> Path:
    """The page that the program names last."""
    page = Path(said.splitlines()[-1].removeprefix("page: "))
    assert page.is_file()
    return page


def test_own_model(tmp_path, monkeypatch, capsys) -> None:
    assert len((EXAMPLES / "own_model.py").read_text().splitlines()) <= 21
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run("own_model.py", monkeypatch)
    said = capsys.readouterr().out
    assert page_of(said).is_relative_to(tmp_path)
    assert said.startswith("Leaks: 1 of 1 image above 25 dB, 1 certified")


@pytest.mark.parametrize(
    ("options", "answer"),
    [([], "Leaks: 1 of 1"), pytest.param(["--freeze"], "Not tested:", marks=pytest.mark.long)],
)
def test_fine_tuning_from_a_local_folder(options: list[str], answer: str, tmp_path, monkeypatch, capsys) -> None:
    """The model is published with another classifier, which fine-tuning replaces; so deep no search fits the budget."""
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}
    config = transformers.ViTConfig(image_size=64, patch_size=8, num_labels=5, **shape)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "weights")
    given = ["--weights", tmp_path / "weights", "--out", tmp_path / "page", *options]
    run("huggingface_finetuning.py", monkeypatch, *given)
    said = capsys.readouterr().out
    assert page_of(said) == tmp_path / "page" / "report.html"
    assert said.startswith(answer)


def test_fine_tuning_names_a_folder_without_a_model(monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("huggingface_finetuning.py", monkeypatch, "--weights", "nowhere")
    assert "nowhere holds no config.json" in capsys.readouterr().err


def test_the_notebook_is_stored_without_outputs() -> None:
    """`make notebook` runs it from top to bottom."""
    cells = json.loads((EXAMPLES / "audit.ipynb").read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 5
    assert [(cell["outputs"], cell["execution_count"]) for cell in code] == [([], None)] * len(code)
