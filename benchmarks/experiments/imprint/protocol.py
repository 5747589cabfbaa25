"""Rounds of a server that sets layers of the model that it sends; the protocol stands in `options.Options`."""

from __future__ import annotations

from typing import ClassVar

from rich.console import Console

from experiments.fishing.protocol import Run as FishingRun
from experiments.imprint.options import Options
from experiments.imprint.render import IMPRINT
from experiments.rendering import Rendering


def run(options: Options, console: Console) -> None:
    """Attack, then write tables and figures."""
    Run(options, console)()


class Run(FishingRun):
    """One call of the benchmark."""

    program: ClassVar[str] = "imprint"
    rendering: ClassVar[Rendering] = IMPRINT
