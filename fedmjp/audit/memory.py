"""Earlier updates of the audited clients, for attacks over several rounds; also on disk, so that a run can resume."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from attacks import Observation
from attacks.memory import remember
from fedmjp.records.files import read_sealed, write_sealed

# What differs between updates of a client besides tensors, because of what was undone (`attacks.fingerprints.repair`).
OWN = ("kind", "learning_rate")
START_AGAIN = "the run cannot go on; start it again in another --out"


class Memory:
    """The parts of each client's earlier updates that the server keeps.

    Args:
        folder: of the files, one per update; updates of an interrupted run that exist there are loaded.
        layers: kept beside the layers that make the tokens (`Attack.remembered_layers`).
    """

    def __init__(self, folder: Path, layers: tuple[str, ...] = ()) -> None:
        self.folder, self.layers = folder, layers
        self._updates: dict[int, dict[int, Observation]] = defaultdict(dict)  # client -> round -> update

    def before(self, present: Observation) -> list[Observation]:
        """Updates of the same client in earlier rounds, oldest first.

        They are copies, so that what attacks derive from them (`Observation.once`) is not kept over rounds.
        """
        if present.client not in self._updates:
            self._read(present)
        known = self._updates[present.client]
        return [replace(known[number]) for number in sorted(known) if number < present.round]

    def add(self, observation: Observation) -> None:
        """Keep the part of an update that later attacks need, in memory and on disk; without labels and draws."""
        kept = _without_grants(remember(observation, self.layers))
        self._updates[kept.client][kept.round] = kept
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"gradient.{n}": g for n, g in kept.gradients.items()}
        tensors |= {f"bounds.{n}": b for n, b in kept.bounds.items()}
        tensors |= {f"model.{n}": t for n, t in kept.model.state_dict().items()}
        path = self._file(kept.client, kept.round)
        _write(tensors, path, {name: getattr(kept, name) for name in OWN})

    def first_sent(self, client: int, sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights by name of the first call for this client, in this process or an interrupted one.

        Args:
            sent: those to keep if this is the first.
        """
        path = self.folder / f"client{client:04d}_sent.safetensors"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(sent, path)
        return load(read_sealed(path, START_AGAIN)[0])

    def _file(self, client: int, number: int) -> Path:
        return self.folder / f"client{client:04d}_round{number:05d}.safetensors"

    def _read(self, present: Observation) -> None:
        """Load this client's updates that an interrupted run has written."""
        template = _without_grants(remember(present, self.layers))
        for path in sorted(self.folder.glob(f"client{present.client:04d}_round*.safetensors")):
            number = int(path.stem.rpartition("round")[2])
            device = next(iter(present.gradients.values())).device
            content, own = read_sealed(path, START_AGAIN)
            tensors = {n: t.to(device) for n, t in load(content).items()}
            gradients, bounds, state = (_part(tensors, prefix) for prefix in ("gradient.", "bounds.", "model."))
            model = copy.deepcopy(template.model)
            model.load_state_dict(state)
            self._updates[present.client][number] = replace(
                template, gradients=gradients, bounds=bounds, model=model, round=number, **own
            )


def _without_grants(observation: Observation) -> Observation:
    return replace(observation, labels=None, later_labels=None, drawn=None)


def _write(tensors: Mapping[str, Tensor], path: Path, own: Mapping[str, Any] | None = None) -> None:
    write_sealed(path, save({n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}), own)


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
