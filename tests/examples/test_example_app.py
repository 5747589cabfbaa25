"""The example app: complete, short, one line for the audit, and an audit that finds the clients' photographs."""

from __future__ import annotations

import io
import re
import tomllib
import zipfile
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate
from PIL import Image

from fedmjp.federation.local_grid import LocalGrid
from fedmjp.metrics import psnr

APP = Path(__file__).resolve().parents[2] / "examples" / "flower_app"
SOURCES = sorted((APP / "photo_vit").glob("*.py"))
PROJECT = tomllib.loads((APP / "pyproject.toml").read_text())
CONFIG = PROJECT["tool"]["flwr"]["app"]["config"]


@pytest.fixture(autouse=True)
def importable(monkeypatch) -> None:
    monkeypatch.syspath_prepend(APP)


def run(out: Path, clients: int = 2, **changes) -> None:
    """The app in this process: Flower's own ServerApp, ClientApp and FedAvg; only the grid is in memory."""
    config = CONFIG | {"out": str(out)} | {name.replace("_", "-"): value for name, value in changes.items()}
    places = (PROJECT["tool"]["flwr"]["app"]["components"][kind] for kind in ("clientapp", "serverapp"))
    client, server = (getattr(import_module(m), a) for m, a in (place.split(":") for place in places))
    server(LocalGrid(client, clients, config), Context(1, 0, {}, RecordDict(), config))


def test_the_app_is_short_and_the_audit_one_line() -> None:
    code = [line for source in SOURCES for line in source.read_text().splitlines()]
    assert len(code) < 80
    assert sum("Watcher(" in line for line in code) == 1
    client = (APP / "photo_vit" / "client_app.py").read_text()
    assert "fedmjp" not in client


def test_the_audit_recovers_every_photograph(tmp_path) -> None:
    run(tmp_path / "leaks")
    task = import_module("photo_vit.task")
    originals = {client: task.load_batch(client, 2, 1)[0] for client in (0, 1)}
    pictures = sorted((tmp_path / "leaks" / "images").glob("*_patch_embedding.png"))
    assert len(pictures) == 2 * CONFIG["rounds"]
    for picture in pictures:
        node = int(re.search(r"_node(\d+)_", picture.name)[1])
        found = torch.from_numpy(np.asarray(Image.open(picture)) / 255).permute(2, 0, 1)[None].float()
        assert float(psnr(found, originals[node - 1])[0]) > 30
    assert "4 of 4 images certified" in (tmp_path / "leaks" / "report.html").read_text()


def test_the_page_says_what_was_not_tested(tmp_path) -> None:
    run(tmp_path / "leaks", batch_size=8)
    page = (tmp_path / "leaks" / "report.html").read_text()
    assert "ot tested" in page
    assert "batch holds 8 images" in page


@pytest.mark.long
def test_local_steps_on_the_same_photograph_hide_nothing(tmp_path) -> None:
    run(tmp_path / "leaks", local_steps=2)
    assert "4 of 4 images certified" in (tmp_path / "leaks" / "report.html").read_text()


def test_flower_packs_the_whole_app() -> None:
    """What `flwr run` sends to a SuperLink: an archive of a valid app, with all of its modules."""
    load_and_validate(APP / "pyproject.toml")
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(APP))) as packed:
        names = packed.namelist()
    assert {str(source.relative_to(APP)) for source in SOURCES} <= set(names)
