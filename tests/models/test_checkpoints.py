"""Checkpoints as people have them: loaded, or refused in one line."""

from __future__ import annotations

import zipfile

import pytest
import torch
from safetensors.torch import save_file

from attacks import UsageError
from fedmjp.models import build_model
from fedmjp.models.weights import read_state


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    """Of a small model, other than the one that is built with seed 0."""
    return build_model("vit_micro8_32", num_classes=4, weights="random", seed=1).module.state_dict()


KEPT = {
    "by itself": lambda state: state,
    "beside an epoch": lambda state: {"model": state, "epoch": 3, "optimizer": {"lr": 0.1}},
    "as Lightning keeps it": lambda state: {"state_dict": state, "hyper_parameters": {"depth": 2}},
    "nested": lambda state: {"state_dict": {"model": state}},
    "of DataParallel": lambda state: {f"module.{name}": tensor for name, tensor in state.items()},
    "of torch.compile": lambda state: {f"_orig_mod.{name}": tensor for name, tensor in state.items()},
    "with stray entries": lambda state: {**state, "note": "trained on a Tuesday", "step": 7},
    "in half precision": lambda state: {name: tensor.half() for name, tensor in state.items()},
}


@pytest.mark.parametrize("way", list(KEPT))
def test_checkpoints_are_read(tmp_path, state, way: str) -> None:
    path = tmp_path / "weights.pt"
    torch.save(KEPT[way](state), path)
    built = build_model("vit_micro8_32", num_classes=4, weights=str(path))
    loaded = built.module.state_dict()
    assert all(torch.allclose(loaded[name], state[name], atol=1e-3) for name in state)


def test_nothing_else_is_read(tmp_path, state) -> None:
    bad = {
        "nan.pt": (lambda path: torch.save(state | {"norm.bias": state["norm.bias"] * torch.nan}, path), "NaN"),
        "expanded.pt": (
            lambda path: torch.save({"w": torch.zeros(1).expand(10**9)}, path),
            "more entries than the file",
        ),
        "empty.pt": (lambda path: torch.save({"epoch": 3}, path), "holds no tensors by name"),
        "list.pt": (lambda path: torch.save([1, 2], path), "holds no tensors by name"),
        "cut.pt": (lambda path: path.write_bytes(b"PK\x03\x04 and nothing more"), "not a readable checkpoint"),
        "cut.safetensors": (lambda path: path.write_bytes(b"\xff" * 20), "not a readable checkpoint"),
        "nan.safetensors": (lambda path: save_file({"w": torch.tensor([torch.inf])}, path), "NaN or infinity"),
    }
    for name, (write, words) in bad.items():
        write(tmp_path / name)
        with pytest.raises(UsageError, match=words) as caught:
            read_state(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_an_archive_that_unpacks_to_far_more_is_not_unpacked(tmp_path) -> None:
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"")
        archive.writestr("archive/data/0", bytes(50_000_000))
    assert path.stat().st_size < 1e6
    with pytest.raises(UsageError, match="unpacks to 50 MB"):
        read_state(path)
