"""Which images and attacks the picture of a run shows."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from fedmjp.records.images import image_path
from fedmjp.records.rows import load_rows
from fedmjp.report import read_panels
from tests.records.sample_rows import make_row, write_run

LEVELS = {"mean_image": 12.0, "a": 15.0, "b": 40.0, "c": 20.0, "d": 16.0, "e": 30.0}


@pytest.fixture
def run(tmp_path):
    """Two defences, three clients; `e` was run on the last client alone, and left half of its pixels unvouched."""
    rows = []
    for defense in ("none", "mjp:gamma=0.1"):
        for client in range(3):
            for name, level in LEVELS.items():
                if name == "e" and client < 2:
                    continue
                place = {"defense": defense, "client": client, "image_id": str(client)}
                rows.append(make_row(attack=name, psnr=level + client / 10, **place))
                for what in (name, "original", "seen", "e_known"):
                    path = image_path(tmp_path, defense, 1, client, 0, what)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    pixels = np.full((4, 4, 3), 255, dtype=np.uint8)
                    pixels[:2] = 0
                    Image.fromarray(pixels).save(path)
    return write_run(tmp_path, rows)


def test_the_strongest_attack_comes_first_and_four_are_shown(run):
    panels = read_panels(run, load_rows(run / "rows.jsonl"))
    assert [panel.title for panel in panels] == [
        "none, round 1, client 2",  # the image that most of the four were run on
        "none, round 1, client 0",
        "mjp, gamma 0.1, round 1, client 2",
        "mjp, gamma 0.1, round 1, client 0",
    ]
    assert list(panels[0].reconstructions) == ["b", "e", "c", "d"]
    assert list(panels[1].reconstructions) == ["b", "c", "d"]
    known = panels[0].reconstructions["e"].known
    assert known.tolist() == [[False] * 4] * 2 + [[True] * 4] * 2
    assert panels[0].reconstructions["b"].known is None
