"""The plane of accuracy and leakage: who stands where, as a reader of the SVG finds it."""

from __future__ import annotations

import json
import re
from html import unescape

from fedmjp.leaderboard import figure

POINTS = [
    {"number": 1, "link": "a", "accuracy": 0.75, "places": {"worst": (30.0, "leaks", "a"), "one": (None, "leaks", "")}},
    {"number": 2, "link": "b", "accuracy": 0.75, "places": {"worst": (31.0, "partly", "b")}},
    {"number": 3, "link": "c", "accuracy": 0.60, "places": {"worst": (None, "not tested", "c")}},
]


def places_of(svg: str) -> list[dict]:
    """What each point holds of its tiers: (y, colour, words, x)."""
    return [json.loads(unescape(data)) for data in re.findall(r'data-y="([^"]*)"', svg)]


def test_every_submission_stands_in_the_plane_of_the_tiers_it_was_run_under() -> None:
    first, second, third = places_of(figure.plane(POINTS, {"one": "one update"}, (0.5, 0.86)))
    bottom = figure.HEIGHT - figure.BOTTOM
    assert (first["one"][0], third["worst"][0]) == (bottom, bottom)  # no image: 0 dB, not left out
    assert "one" not in second
    assert second["worst"][0] < first["worst"][0] < bottom
    assert abs(first["worst"][3] - second["worst"][3]) >= 2 * figure.RADIUS  # side by side
    assert third["worst"][3] < min(first["worst"][3], second["worst"][3])


def test_the_interval_of_the_accuracy_lies_within_the_axes() -> None:
    bar = re.search(r'<path d="M([\d.]+) \S+M\S+ \S+H([\d.]+)M', figure.plane(POINTS, {}, (0.5, 0.86)))
    left, right = map(float, bar.groups())
    assert figure.LEFT < left < right < figure.WIDTH - figure.RIGHT
    assert "95 % interval" not in figure.plane(POINTS, {})
