"""Files of what an attack has learned from public photographs: tensors in half precision, as safetensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from attacks.registry import UsageError

Learned = TypeVar("Learned")


def write_learned(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors in half precision."""
    save_file({name: tensor.half().contiguous() for name, tensor in tensors.items()}, path)


def read_learned(path: Path, build: Callable[[dict[str, Tensor]], Learned], what: str, how: str) -> Learned:
    """What a file holds.

    Args:
        path: of a file that `write_learned` wrote.
        build: from its tensors, as float32; a `KeyError` or `RuntimeError` says that they are of something else.
        what: it should hold.
        how: another is made, as a clause.

    Raises:
        UsageError: no such file, or one that holds something else.
    """
    try:
        return build({name: tensor.float() for name, tensor in load_file(path).items()})
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise UsageError(f"{path} holds no {what}; {how}") from error
