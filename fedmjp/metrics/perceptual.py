"""LPIPS (Zhang et al. 2018) through the `lpips` package, with weights that are really there or not at all."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from attacks.registry import UsageError

TRUNKS = {"squeeze": "squeezenet1_1-*.pth", "alex": "alexnet-*.pth", "vgg": "vgg16-*.pth"}


@dataclass(frozen=True)
class Lpips:
    """LPIPS distance with one backbone.

    Attributes:
        network: the `lpips.LPIPS` module.
        label: backbone, for table headers.
    """

    network: nn.Module
    label: str

    @torch.no_grad()
    def __call__(self, reconstruction: Tensor, original: Tensor) -> Tensor:
        """Distance of (B, 3, H, W) images in [0, 1]; (B,), 0 for identical images."""
        return self.network(reconstruction.float(), original.float(), normalize=True).flatten()


def load_lpips(net: str = "squeeze", weights: Path | None = None, device: torch.device | str = "cpu") -> Lpips | None:
    """The LPIPS metric, or None with a warning where its weights are not at hand.

    Args:
        net: "squeeze", "alex" or "vgg".
        weights: state dict of `lpips.LPIPS(net=net)` with its trunk; without it torchvision's cached trunk is used.

    Raises:
        UsageError: unknown backbone, or a file that is missing or does not fit.
    """
    if net not in TRUNKS:
        raise UsageError(f"unknown LPIPS backbone {net!r}; choose from: {', '.join(TRUNKS)}")
    if weights is not None and not Path(weights).is_file():
        raise UsageError(f"no LPIPS weights at {weights}; pass the state dict of lpips.LPIPS(net={net!r})")
    cached = any(Path(torch.hub.get_dir(), "checkpoints").glob(TRUNKS[net]))
    if weights is None and not cached:
        warnings.warn(
            f"LPIPS is left empty: torchvision's {net} backbone is not cached; pass --lpips-weights FILE", stacklevel=2
        )
        return None
    network = _network(net, random_trunk=weights is not None)
    if weights is not None:
        try:
            network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
        except Exception as error:  # a damaged or foreign file fails in many ways inside the reader
            raise UsageError(f"{weights} does not hold the weights of lpips.LPIPS(net={net!r})") from error
    return Lpips(network.eval().requires_grad_(False).to(device), net)


def _network(net: str, *, random_trunk: bool) -> nn.Module:
    try:
        import lpips
    except ImportError as error:
        raise UsageError("LPIPS needs the package lpips: pip install lpips") from error
    with warnings.catch_warnings():  # torchvision deprecates the way lpips asks it for its trunk
        warnings.simplefilter("ignore")
        return lpips.LPIPS(net=net, pnet_rand=random_trunk, verbose=False)
