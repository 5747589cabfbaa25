"""A simulated accelerator: tensors on the device `simulated:0`, computed on the CPU, that refuse what CUDA refuses.

torch's Python backend for PrivateUse1 (experimental in torch 2.14) gives the device its name; a dispatch mode computes
each operation on the CPU and raises where tensors of two devices meet, where a CPU generator draws for the device, and
where a tensor of the device is turned into an array. What it cannot show: kernels that CUDA lacks or rounds otherwise,
streams, and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "simulated"
# Copies between devices; and operations in which an index may stay on the CPU.
COPIES = {"aten::copy_", "aten::_to_copy", "aten::_copy_from"}
INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index", "aten::_index_put_impl_"}
# Operations that take no tensor without dimensions from the CPU either.
STRICT = (
    "cat",
    "stack",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "gather",
    "scatter",
    "index_select",
    "index_add",
    "dot",
    "linalg_",
    "convolution",
    "native_layer_norm",
    "embedding",
    "nll_loss",
)


class DeviceMixed(RuntimeError):
    """Two devices met in one operation."""


class OnDevice(Tensor):
    """A tensor of the simulated device, with its values in `raw`."""

    @staticmethod
    def __new__(cls, raw: Tensor) -> OnDevice:
        found = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )
        found.raw = raw
        return found

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None) -> Any:
        return compute(function, arguments, named or {})

    def __repr__(self, **_: Any) -> str:
        return f"{NAME}({self.raw})"

    def numpy(self, *_: Any, **__: Any) -> None:
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = numpy

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: OnDevice) -> None:
        torch._C.TensorBase.data.__set__(self, value)  # shape and type
        self.raw = value.raw

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor.__getitem__(self, _without_lists(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        Tensor.__setitem__(self, _without_lists(index), value)

    def tolist(self) -> list:
        return self.raw.tolist()

    def new_tensor(self, data: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device)

    def __deepcopy__(self, memo: dict) -> Tensor:
        if id(self) not in memo:
            copied = OnDevice(self.raw.clone()).requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                copied._is_param = True
            memo[id(self)] = copied
        return memo[id(self)]


class _Mode(TorchDispatchMode):
    """Computes what is made on the device from no tensor (`torch.ones(1, device="simulated")`), and moves to it."""

    def __torch_dispatch__(self, function, types, arguments=(), named=None) -> Any:
        return compute(function, arguments, named or {})


def compute(function: Any, arguments: tuple, named: dict[str, Any]) -> Any:
    """Refuse what the device would refuse, then compute on the CPU; results are on the device that CUDA gives them."""
    name, there, here = function._schema.name, [], []
    for x in _leaves((arguments, named)):
        if isinstance(x, Tensor):
            (there if isinstance(x, OnDevice) else here).append(x)
    asked = named.get("device")
    lands = _is_simulated(asked) if asked is not None else bool(there)
    if not there and not lands:
        return function(*arguments, **named)
    if name == "aten::copy_":
        lands = isinstance(arguments[0], OnDevice)
    generator = named.get("generator")
    if generator is not None and lands and not _is_simulated(generator.device):
        raise DeviceMixed(f"Expected a '{NAME}' device type for generator but found '{generator.device}' ({name})")
    if there and here and name not in COPIES:
        _refuse_mixed(name, arguments, here)
    outside: dict[int, Tensor] = {}

    def inside(x: Any) -> Any:
        if isinstance(x, OnDevice):
            outside[id(x.raw)] = x
            return x.raw
        return torch.device("cpu") if isinstance(x, torch.device) and _is_simulated(x) else x

    def wrapped(x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, OnDevice):
            return x
        return outside.get(id(x)) if id(x) in outside else OnDevice(x) if lands else x

    plain, options = _mapped(inside, (arguments, named))
    found = _mapped(wrapped, function(*plain, **options))
    if lands and torch.Tag.inplace_view in function.tags:
        with no_dispatch():
            function(*arguments, **named)  # the shape that the outer tensor states
    return found


def _leaves(x: Any) -> Iterator[Any]:
    """What an operation's arguments hold; torch's own function for any structure takes several times as long."""
    if isinstance(x, (list, tuple, dict)):
        for part in x.values() if isinstance(x, dict) else x:
            yield from _leaves(part)
    else:
        yield x


def _mapped(change: Callable[[Any], Any], x: Any) -> Any:
    """The same structure with every leaf changed."""
    if isinstance(x, dict):
        return {key: _mapped(change, part) for key, part in x.items()}
    if isinstance(x, (list, tuple)):
        parts = [_mapped(change, part) for part in x]
        return parts if isinstance(x, list) else tuple(parts)
    return change(x)


def _refuse_mixed(name: str, arguments: tuple, here: list[Tensor]) -> None:
    bad = [t for t in here if t.dim() > 0]
    if name in INDEXED:
        if not isinstance(arguments[0], OnDevice):
            raise DeviceMixed(f"indices should be either on cpu or on the device of the indexed tensor (cpu) ({name})")
        values = arguments[2] if "put" in name else None
        bad = [t for t in bad if t is values]
    elif any(name.removeprefix("aten::").startswith(strict) for strict in STRICT):
        bad = here
    if bad:
        shapes = [tuple(t.shape) for t in bad]
        raise DeviceMixed(
            f"Expected all tensors to be on the same device, but found {NAME}:0 and cpu {shapes} ({name})"
        )


def _without_lists(index: Any) -> Any:
    """An index whose lists are tensors, which torch would make of them on the device itself."""
    if isinstance(index, (list, range)):
        index = torch.tensor(list(index))
        return index if len(index) else index.long()
    return tuple(map(_without_lists, index)) if isinstance(index, tuple) else index


def _is_simulated(device: Any) -> bool:
    return torch.device(device).type == NAME


class _Backend(_DummyBackendModule):
    """Available only inside the block: torch keeps a backend's name, and `nn.DataParallel` takes what is available."""

    present = False

    def is_available(self) -> bool:
        return self.present

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


@lru_cache
def _registered() -> _Backend:
    # At its first use autograd starts a thread a device, which would outlive the interpreter and abort it at the end.
    torch.ones(1, requires_grad=True).sum().backward()
    backend = _Backend()
    _setup_privateuseone_for_python_backend(NAME, backend)
    return backend


@contextmanager
def simulated_accelerator() -> Iterator[torch.device]:
    """The device, usable inside the block. `torch.tensor` and `torch.as_tensor`, which no mode sees, are led to it."""
    backend = _registered()
    plain = {name: getattr(torch, name) for name in ("tensor", "as_tensor")}

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        made = plain["tensor"](data, **options)
        return made if device is None else made.to(device)

    def as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        made = data if isinstance(data, Tensor) else plain["as_tensor"](data)
        return made.to(device=device or made.device, dtype=dtype or made.dtype)

    torch.tensor, torch.as_tensor, backend.present = tensor, as_tensor, True
    try:
        with _Mode(), torch.autograd.set_multithreading_enabled(False):
            yield torch.device(NAME, 0)
    finally:
        torch.tensor, torch.as_tensor, backend.present = plain["tensor"], plain["as_tensor"], False
        torch.use_deterministic_algorithms(False)
