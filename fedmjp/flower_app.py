"""The ServerApp of `flwr run .`: the run of `fedmjp.simulate` on a SuperLink with SuperNodes.

Flower lets --run-config change only keys that pyproject.toml lists under [tool.flwr.app.config]. That section is
written from the options of `fedmjp.config`, never by hand:

    python -m fedmjp.flower_app --write-config pyproject.toml

Keys are the command line's options with underscores; "" stands for none given. Options of defences from other packages
go into one key, spelled as on the command line: --run-config 'defense="toy" defense_options="toy.gamma=0.5,speed=2"'.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from attacks.observation import Capability
from attacks.registry import UsageError
from fedmjp.cli import guarded, parse, terminal
from fedmjp.config import DefenseOptions, ModelConfig, RunConfig, from_flat, option_places
from fedmjp.defenses import DEFENSES
from fedmjp.defenses.options import require_used
from fedmjp.federation import server_app_for
from fedmjp.settings import split_entries

SECTION = "[tool.flwr.app.config]"
# What a run on a SuperLink starts from, where it differs from the command line's defaults.
BASE = RunConfig(defense=("mjp",), model=ModelConfig("deit_ti"), out=Path("runs/flower"))
# The nodes are the clients, which draw from entropy of their own; the grid is Flower's own, and its ServerApp attacks.
FIXED = ("clients", "engine", "client_seed", "workers", "ray")
PLUGINS = "defense_options"


def configuration(run_config: Mapping[str, Any], clients: int) -> RunConfig:
    """The run that `flwr run` asks for.

    Args:
        run_config: the section of pyproject.toml with the values of --run-config.
        clients: number of SuperNodes.

    Raises:
        UsageError: no such option, a value that is not of its type, or an option of a defence that does not run.
    """
    options = dict(run_config)
    for entry in split_entries([str(options.pop(PLUGINS, ""))]):
        name, equals, value = entry.partition("=")
        if not equals:
            raise UsageError(f"{PLUGINS} takes OPTION=value, with commas between several, not {entry!r}")
        options[name] = value
    config = from_flat({**options, "clients": clients}, BASE)
    require_used(config.options, config.defense)
    return config


def default_config() -> dict[str, Any]:
    """The keys of the section and their values as TOML has them; without the options of other packages' defences."""
    values = {}
    for name, (path, _) in option_places().items():
        built_in = name not in DefenseOptions.places or DEFENSES.is_built_in(path[1])
        if built_in and name not in FIXED:
            values[name] = _as_toml(_value_at(BASE, path))
    return {**values, PLUGINS: ""}


def write_config(project: Path) -> None:
    """Replace the section in a pyproject.toml.

    Raises:
        UsageError: no such file, or no such section in it.
    """
    if not project.is_file() or SECTION not in project.read_text(encoding="utf-8"):
        raise UsageError(f"{project} is no file with a section {SECTION}")
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in default_config().items())
    text = project.read_text(encoding="utf-8")
    section = re.compile(re.escape(SECTION) + r"\n(?:(?!\[).*\n?)*")
    project.write_text(section.sub(lambda _: f"{SECTION}\n{lines}", text), encoding="utf-8")


def _value_at(config: Any, path: Sequence[str]) -> Any:
    for name in path:
        config = getattr(config, name)
    return config


def _as_toml(value: Any) -> Any:
    """Numbers, words and booleans as they are, tuples with commas, None as ""."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return value if isinstance(value, (bool, int, float)) else "" if value is None else str(value)


def _run(grid: Any, run_config: Mapping[str, Any]) -> None:
    from fedmjp.audited_federation import run_on_grid
    from fedmjp.before_start import check_before_start
    from fedmjp.progress import RunProgress
    from fedmjp.records.run_folder import IF_DEALT_OUT, RunFolder
    from fedmjp.simulate import report

    config = configuration(run_config, len(list(grid.get_node_ids())))
    for grant in (Capability.LABELS, Capability.CLIENT_SEED):
        if grant in config.threat_model().grants:
            raise UsageError(
                f"grants={grant.value} has no meaning here: on SuperNodes only the clients know what they drew"
            )
    console = terminal()
    for guarantee in check_before_start(config):
        console.print(f"{guarantee} {IF_DEALT_OUT}", highlight=False, soft_wrap=True)
    folder = RunFolder(config)
    if not folder.is_finished():
        run_on_grid(grid, config, folder, RunProgress(console), simulated=False)
        folder.finish()
    console.print(f"report: {report(folder, console)}")
    folder.require_attacked()


app = server_app_for(_run)


@dataclass(frozen=True)
class Options:
    """Write the options of `flwr run` into a pyproject.toml."""

    write_config: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """The pyproject.toml whose section [tool.flwr.app.config] is written anew."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    options = parse(Options, "python -m fedmjp.flower_app", Options.__doc__, arguments)
    return guarded(lambda: write_config(options.write_config), lambda: "nothing is written")


if __name__ == "__main__":
    sys.exit(main())
