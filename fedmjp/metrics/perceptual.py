"""LPIPS (Zhang et al. 2018) through the `lpips` package.

The squeeze backbone ships with this package, in half precision (values within 1e-3 of full precision, a test compares
them). Other backbones are read from a file or from torchvision's cache; nothing is downloaded, and without weights
there is no metric.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor, nn

from attacks.registry import UsageError
from fedmjp.metrics.pairs import checked_pair

# The files that torchvision loads from its cache; with another hash in the name it would download them without notice.
TRUNKS = {"squeeze": "squeezenet1_1-b8a52dc0.pth", "alex": "alexnet-owt-7be5be79.pth", "vgg": "vgg16-397923af.pth"}
SHIPPED = Path(__file__).resolve().parent / "weights" / "lpips_squeeze.safetensors"
SHIPPED_SHA256 = "a01e4094d595049279c3f3b0f4496277beb510b79a188005e306a4ca3bb709b4"
# Below these sides (pixels) a pooling layer of the trunk has nothing left to pool.
SMALLEST = {"squeeze": 17, "alex": 31, "vgg": 16}


@dataclass(frozen=True)
class Lpips:
    """LPIPS distance with one backbone.

    Attributes:
        network: the `lpips.LPIPS` module.
        net: the backbone; distances of different backbones are not comparable.
    """

    network: nn.Module
    net: str

    @property
    def label(self) -> str:
        """Name for table headers, for example "lpips[squeeze]"."""
        return f"lpips[{self.net}]"

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the backbone takes images of this shape (..., C, H, W): large enough, of one or three channels."""
        return min(shape[-2:]) >= SMALLEST[self.net] and shape[-3] in (1, 3)

    @torch.no_grad()
    def __call__(self, reconstruction: Tensor, original: Tensor) -> Tensor:
        """Distance of (B, 3, H, W) or grey (B, 1, H, W) images in [0, 1].

        Returns:
            (B,) float32 on the images' device, 0 for identical images; NaN for images too small for the backbone, or of
            another number of channels.

        Raises:
            UsageError: see `pairs.checked_pair`.
        """
        pair = checked_pair(reconstruction, original)
        if not self.fits(original.shape):
            return torch.full((len(original),), float("nan"), device=original.device)
        parameter = next(self.network.parameters())
        placed = (images.to(parameter.device, parameter.dtype, memory_format=torch.channels_last) for images in pair)
        return self.network(*placed, normalize=True).flatten().to(original.device, torch.float32)


def load_lpips(net: str = "squeeze", weights: Path | None = None, device: torch.device | str = "cpu") -> Lpips | None:
    """The LPIPS metric, or None with a warning where its weights are not available.

    Args:
        net: "squeeze", "alex" or "vgg".
        weights: state dict of `lpips.LPIPS(net=net)` with its trunk. Without it squeeze takes the shipped weights, and
            the others torchvision's cached trunk.

    Raises:
        UsageError: unknown backbone, or a file that is missing, damaged or does not fit.
    """
    if net not in TRUNKS:
        raise UsageError(f"unknown LPIPS backbone {net!r}; choose from: {', '.join(TRUNKS)}")
    if weights is not None and not Path(weights).is_file():
        raise UsageError(f"no LPIPS weights at {weights}; pass the state dict of lpips.LPIPS(net={net!r})")
    trunk = Path(torch.hub.get_dir(), "checkpoints", TRUNKS[net])
    if weights is None and net != "squeeze" and not trunk.is_file():
        warnings.warn(
            f"LPIPS is left empty: torchvision's {net} backbone is not cached ({trunk}); pass --lpips-weights FILE, or "
            "use squeeze, whose weights ship with fedmjp",
            stacklevel=2,
        )
        return None
    network = _network(net, random_trunk=weights is not None or net == "squeeze")
    if weights is not None:
        try:
            network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
        except Exception as error:  # a damaged or foreign file fails in many ways inside the reader
            raise UsageError(f"{weights} does not hold the weights of lpips.LPIPS(net={net!r})") from error
    elif net == "squeeze":
        network.load_state_dict(_shipped())
    # cuDNN rounds float32 convolutions to TF32 unless the whole process forbids it; double is never rounded.
    dtype = torch.float64 if torch.device(device).type == "cuda" else torch.float32
    # The channels-last format is twice as fast on a CPU.
    network = network.eval().requires_grad_(False).to(device, dtype).to(memory_format=torch.channels_last)
    return Lpips(network, net)


def _shipped() -> Mapping[str, Tensor]:
    """State dict of the shipped weights, in float32; `lin0` and `lins.0` are two names of one layer.

    Raises:
        UsageError: the file is missing or is not the one that was shipped.
    """
    content = SHIPPED.read_bytes() if SHIPPED.is_file() else b""
    if hashlib.sha256(content).hexdigest() != SHIPPED_SHA256:
        raise UsageError(f"{SHIPPED} is missing or damaged; install fedmjp again")
    stored = {name: value.float() for name, value in load(content).items()}
    return stored | {re.sub(r"^lin(\d)", r"lins.\1", n): v for n, v in stored.items() if n.startswith("lin")}


def _network(net: str, *, random_trunk: bool) -> nn.Module:
    try:
        import lpips
    except ImportError as error:
        raise UsageError("LPIPS needs the package lpips: pip install lpips") from error
    # The random initial weights, which are overwritten at once, must not change the state of the experiment's random
    # generator. torchvision warns that the way in which lpips loads the trunk is deprecated.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lpips.LPIPS(net=net, pnet_rand=random_trunk, verbose=False)
