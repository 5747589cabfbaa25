"""What the clients of a simulation keep between two rounds, on the disk, so that an interrupted run goes on.

Residuals of error feedback, a client's own teacher, and the model that a client compares the next one with are in no
message. Flower keeps them in memory, which ends with the process. Each federation has a folder: for each client and
round a record that names its arrays by their digests, and the arrays, of which equal ones (a model that many clients
were sent) are there once. Of each client the last finished round stays, beside what the round under way has written.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from attacks.registry import UsageError
from fedmjp.records.files import read_record, write_record, write_whole

RECORD = re.compile(r"(\d+)-(\d+)\.json")  # client and round
ADVICE = "the run cannot go on; start it again in another --out"


class KeptArray(NamedTuple):
    """An array as a Flower message has it.

    Attributes:
        dtype: name of the type of its values.
        shape: of the array.
        stype: how `data` holds the values.
        data: its bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    stype: str
    data: bytes


Kept = dict[str, dict[str, KeptArray]]  # name of a record in the node's state -> name of an array -> array


@dataclass(frozen=True)
class ClientStates:
    """The clients' states of a run.

    Args:
        folder: where they are; made when the first is written.
    """

    folder: Path

    def write(self, defense: str, client: int, round: int, kept: Mapping[str, Mapping[str, KeptArray]]) -> None:
        """Have what a client keeps after a round on the disk."""
        place = self._place(defense)
        place.mkdir(parents=True, exist_ok=True)
        records: dict[str, dict[str, list]] = {}
        for record, arrays in kept.items():
            own = records[record] = {}
            for name, array in arrays.items():
                digest = hashlib.sha256(array.data).hexdigest()
                if not (place / digest).exists():
                    own_file = place / f"{digest}-{client}"  # another process may be writing the same array
                    write_whole(own_file, array.data)
                    own_file.replace(place / digest)
                own[name] = [array.dtype, list(array.shape), array.stype, digest]
        write_record(place / f"{client}-{round}.json", {"records": records})

    def read(self, defense: str, client: int, round: int) -> Kept:
        """What a client kept before `round`, in the last round that it took part in; empty if there is none.

        Raises:
            UsageError: a file is missing, or is not as it was written.
        """
        last = self.last_rounds(defense, round - 1).get(client)
        return {} if last is None else self._read(defense, client, last)

    def check(self, defense: str, rounds: Mapping[int, int]) -> None:
        """Check that what each client of `rounds` kept after its round can be read.

        Raises:
            UsageError: see `read`.
        """
        for client, number in rounds.items():
            self._read(defense, client, number)

    def last_rounds(self, defense: str, until: int) -> dict[int, int]:
        """Client -> the last of the rounds up to `until` after which its state was written, if there is one."""
        found = {c: [r for r in rounds if r <= until] for c, rounds in self._rounds(defense).items()}
        return {client: max(rounds) for client, rounds in found.items() if rounds}

    def keep_only(self, defense: str, rounds: Mapping[int, int]) -> None:
        """Drop all but the state of one round for each client of `rounds`."""
        place, used = self._place(defense), set()
        for client, number in rounds.items():
            path = place / f"{client}-{number}.json"
            records = read_record(path, ADVICE)["records"].values()
            used |= {path.name, *(digest for arrays in records for *_, digest in arrays.values())}
        for path in place.iterdir() if place.is_dir() else ():
            if path.name not in used:
                path.unlink(missing_ok=True)

    def _read(self, defense: str, client: int, round: int) -> Kept:
        """What a client kept after `round`."""
        place = self._place(defense)
        records = read_record(place / f"{client}-{round}.json", ADVICE)["records"]
        return {
            record: {name: self._array(place, *array) for name, array in arrays.items()}
            for record, arrays in records.items()
        }

    def _place(self, defense: str) -> Path:
        return self.folder / f"{defense}_clients"

    def _rounds(self, defense: str) -> dict[int, list[int]]:
        """Client -> rounds after which its state was written."""
        found: dict[int, list[int]] = {}
        place = self._place(defense)
        for path in place.iterdir() if place.is_dir() else ():
            if match := RECORD.fullmatch(path.name):
                found.setdefault(int(match[1]), []).append(int(match[2]))
        return found

    @staticmethod
    def _array(place: Path, dtype: str, shape: list[int], stype: str, digest: str) -> KeptArray:
        path = place / digest
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UsageError(f"{path} cannot be read ({error.strerror}); {ADVICE}") from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise UsageError(f"{path} is damaged: it is not as it was written (digest); {ADVICE}")
        return KeptArray(dtype, tuple(shape), stype, data)
