"""What the layers of a model receive for one made-up image: whether a model computes what its names suggest.

Attacks recognise blocks by the names of their layers, and names do not show what stands between them: a norm before the
first block (CLIP), norms behind the branches instead of before them, biases between the tokens of an attention (BEiT).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

# Largest relative difference from what a layer receives, of float32 (at most 3e-7 on ViTs of timm, where the model is
# read rightly, and 2e-2 and more where not), and the same in units of the round-off of the model's type.
LARGEST_DIFFERENCE, ROUND_OFF_UNITS = 1e-3, 30.0
_REASONS: WeakKeyDictionary[nn.Module, dict[Hashable, str]] = WeakKeyDictionary()


class _AllFound(Exception):
    """Every layer that was asked for has received its input."""


def made_up_image(image_shape: tuple[int, int, int], like: Tensor) -> Tensor:
    """(1, C, H, W) normalised, the same in every call, with the type and on the device of `like`."""
    return torch.randn(1, *image_shape, generator=torch.Generator().manual_seed(0)).to(like)


def layer_inputs(model: nn.Module, names: Sequence[str], images: Tensor) -> dict[str, Tensor]:
    """The first input of each of the named submodules, detached, in evaluation mode; the model is left as it was.

    Layers behind the last of them do not run. Those that were not reached are left out, all of them where the model
    cannot be run: what is kept of the models of earlier rounds cannot.

    Args:
        names: of submodules.
        images: (B, C, H, W) normalised.
    """
    found: dict[str, Tensor] = {}

    def keep_as(name: str) -> Callable[[nn.Module, Any], None]:
        """A hook that keeps a layer's first input under its name."""

        def keep(module: nn.Module, inputs: Any) -> None:
            """Keep it, and end the pass where it is the last one."""
            if inputs and isinstance(inputs[0], Tensor):
                found.setdefault(name, inputs[0].detach())
            if len(found) == len(names):
                raise _AllFound

        return keep

    training = [module for module in model.modules() if module.training]
    hooks = [model.get_submodule(name).register_forward_pre_hook(keep_as(name)) for name in names]
    try:
        model.eval()
        with torch.no_grad():
            model(images)
    except Exception:  # all were found, or the model cannot be run: whatever it raises, its names are all there is
        pass
    finally:
        for hook in hooks:
            hook.remove()
        for module in training:
            module.training = True
    return found


def differs(given: Tensor, expected: Tensor) -> bool:
    """Whether what a layer received, in the model's type, is not what was expected of it, (..., D) float64."""
    largest = max(LARGEST_DIFFERENCE, ROUND_OFF_UNITS * torch.finfo(given.dtype).eps)
    return not float((given.double() - expected).norm()) <= largest * float(expected.norm())


def once_a_model(model: nn.Module, key: Hashable, reason: Callable[[], str]) -> str:
    """Why a model is not built as an attack takes it to be, or "", found out once for all updates of the model.

    Args:
        key: of the question and what it depends on beside the model.
    """
    known = _REASONS.setdefault(model, {})
    if key not in known:
        known[key] = reason()
    return known[key]
