"""The plane of accuracy and leakage as one inline SVG with a few lines of plain script: it needs no network.

Without the script the plane shows every submission's worst case, and the table keeps its order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fedmjp.leaderboard.measure import INCONCLUSIVE, UNTESTED

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 42, 46
RADIUS = 9
MOST = 60.0  # dB; reconstructions above it are exact to the eye
COLOURS = {
    "leaks": "#D55E00",
    "partly": "#E69F00",
    "no leak shown": "#009E73",
    INCONCLUSIVE: "#56B4E9",
    UNTESTED: "#7f7f7f",
    "not tested": "#bdbdbd",
}

SCRIPT = """<script>
(() => {
  const table = document.querySelector("#leaderboard table"), heads = table.tHead.rows[0].cells;
  const number = text => { const n = parseFloat(text); return isNaN(n) ? null : n; };
  [...heads].forEach((head, column) => {
    let up = true;
    const sort = () => {
      const body = table.tBodies[0], value = row => row.cells[column].textContent.trim();
      const compare = (a, b) => {
        const [x, y] = [number(value(a)), number(value(b))];
        return x !== null && y !== null ? x - y : value(a).localeCompare(value(b));
      };
      [...body.rows].sort((a, b) => (up ? 1 : -1) * compare(a, b)).forEach(row => body.append(row));
      [...heads].forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      up = !up;
    };
    head.tabIndex = 0;
    head.style.cursor = "pointer";
    head.title = "sort";
    head.addEventListener("click", sort);
    head.addEventListener("keydown", event => { if (event.key === "Enter") sort(); });
  });
  document.querySelector("#leaderboard-tier").addEventListener("change", event => {
    document.querySelectorAll("#leaderboard-plane g[data-y]").forEach(point => {
      const place = JSON.parse(point.dataset.y)[event.target.value];
      point.style.display = place ? "" : "none";
      if (!place) return;
      point.setAttribute("transform", `translate(${place[3]} ${place[0]})`);
      point.querySelector("circle").setAttribute("fill", place[1]);
      point.querySelector("title").textContent = place[2];
    });
  });
})();
</script>"""


def plane(
    points: Sequence[Mapping[str, Any]], tiers: Mapping[str, str], interval: tuple[float, float] | None = None
) -> str:
    """The figure.

    Args:
        points: each with number, link (of its card), accuracy (share in [0, 1]) and places: tier (or "worst") ->
            (PSNR in dB or None, answer, words). A submission stands at 0 dB where no attack returned an image, and is
            left out of a tier that it was not run under.
        tiers: name -> title, of those that the reader can choose.
        interval: 95 % interval of the accuracy without a defence, shares in [0, 1].
    """
    shares = [point["accuracy"] for point in points] + list(interval or ())
    low, high = max(0.0, min(shares) - 0.05), min(1.0, max(shares) + 0.05)

    def across(share: float) -> float:
        """Horizontal place of an accuracy."""
        return round(LEFT + (share - low) / (high - low) * (WIDTH - LEFT - RIGHT), 1)

    options = "".join(f'<option value="{name}">{escape(title)}</option>' for name, title in tiers.items())
    parts = [
        "<div>",  # Markdown leaves what stands in it as it is
        f'<p><label>Threat tier: <select id="leaderboard-tier"><option value="worst">the worst of all</option>{options}'
        "</select></label></p>",
        f'<svg id="leaderboard-plane" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'style="max-width:min(100%, 900px);font:12px sans-serif" '
        f'aria-label="Accuracy against leakage of {len(points)} submissions">',
        *_axes(low, high, across),
        *(_interval(*map(across, interval)) if interval else ()),
        *(_point(point, spread) for point, spread in zip(points, _spread(points, across), strict=True)),
        *_legend({answer for point in points for _, answer, _ in point["places"].values()}),
        "</svg>",
        "</div>",
    ]
    return "\n".join(parts)


def _down(psnr: float) -> float:
    return round(HEIGHT - BOTTOM - min(max(psnr, 0.0), MOST) / MOST * (HEIGHT - TOP - BOTTOM), 1)


def _axes(low: float, high: float, across: Any) -> list[str]:
    bottom, end = HEIGHT - BOTTOM, WIDTH - RIGHT
    lines = [f'<path d="M{LEFT} {TOP}V{bottom}H{end}" fill="none" stroke="currentColor"/>']
    for psnr in range(0, int(MOST) + 1, 10):
        label = f"≥ {psnr}" if psnr == MOST else str(psnr)
        lines.append(
            f'<path d="M{LEFT} {_down(psnr)}H{end}" stroke="currentColor" opacity=".15"/>'
            f'<text x="{LEFT - 6}" y="{_down(psnr) + 4}" text-anchor="end" fill="currentColor">{label}</text>'
        )
    for percent in range(0, 101, 10):
        if low <= percent / 100 <= high:
            x = across(percent / 100)
            lines.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle" fill="currentColor">{percent}</text>')
    middle, centre = (LEFT + end) / 2, (TOP + bottom) / 2
    lines.append(
        f'<text x="{middle}" y="{bottom + 34}" text-anchor="middle" fill="currentColor">test accuracy after '
        "fine-tuning (%)</text>"
    )
    lines.append(
        f'<text transform="translate(16 {centre}) rotate(-90)" text-anchor="middle" fill="currentColor">median PSNR of '
        "the strongest attack (dB)</text>"
    )
    return lines


def _interval(left: float, right: float) -> list[str]:
    """How far an accuracy is known, as a bar above the axis."""
    y = HEIGHT - BOTTOM - 12
    return [
        f'<path d="M{left} {y - 4}v8M{left} {y}H{right}M{right} {y - 4}v8" fill="none" stroke="currentColor"/>'
        f'<text x="{left + 6}" y="{y - 6}" fill="currentColor">95 % interval of the accuracy without a defence</text>'
    ]


def _spread(points: Sequence[Mapping[str, Any]], across: Any) -> list[dict[str, float]]:
    """For each point the x of each tier: that of its accuracy, or beside the points that stand there already."""
    taken: dict[str, list[tuple[float, float]]] = {}
    found = []
    for point in points:
        own = {}
        for tier, (psnr, _, _) in point["places"].items():
            y, others = _down(psnr or 0.0), taken.setdefault(tier, [])
            steps = (sign * 2 * RADIUS * step for step in range(len(points)) for sign in (1, -1))
            own[tier] = next(
                round(across(point["accuracy"]) + step, 1)
                for step in steps
                if all(
                    abs(across(point["accuracy"]) + step - x) >= 2 * RADIUS or abs(y - other) >= 2 * RADIUS
                    for x, other in others
                )
            )
            others.append((own[tier], y))
        found.append(own)
    return found


def _point(point: Mapping[str, Any], spread: Mapping[str, float]) -> str:
    """A numbered circle that links to its card; `data-y` holds its places under all tiers."""
    places = {
        tier: [_down(psnr or 0.0), COLOURS[answer], words, spread[tier]]
        for tier, (psnr, answer, words) in point["places"].items()
    }
    worst, data = places["worst"], escape(json.dumps(places, ensure_ascii=False), quote=True)
    return (
        f'<g data-y="{data}" transform="translate({worst[3]} {worst[0]})"><a href="#{point["link"]}">'
        f'<title>{escape(worst[2])}</title><circle r="{RADIUS}" fill="{worst[1]}" fill-opacity=".85"/>'
        f'<text y="4" text-anchor="middle" fill="#fff" font-size="10">{point["number"]}</text></a></g>'
    )


def _legend(shown: set[str]) -> list[str]:
    """The colours of the answers that are given."""
    lines, x = [], LEFT + 20
    for answer, colour in ((answer, colour) for answer, colour in COLOURS.items() if answer in shown):
        lines.append(
            f'<circle cx="{x}" cy="12" r="5" fill="{colour}"/>'
            f'<text x="{x + 10}" y="16" fill="currentColor">{answer}</text>'
        )
        x += 40 + 6 * len(answer)
    return lines
