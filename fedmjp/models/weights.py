"""Load weights and describe their origin in words; every table shows this description."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from attacks.observation import SUPERVISED
from attacks.registry import UsageError
from fedmjp.models.registry import SHIPPED_WEIGHTS

SHIPPED = Path(__file__).parent / "checkpoints"
IMAGENET_CLASSES = 1000  # of timm's weights, and the default head for random weights
ORIGIN = "fedmjp"  # key of a .safetensors file's metadata: how the weights were trained, as JSON
# Parameters of the _mjp and _idx variants, which may be absent from a checkpoint or, for other variants, superfluous.
MJP_ONLY = ("unk_embed", "idx_embed", "dal.")
PRETEXT = "pretext."  # an objective's heads (`Objective.attach`)
NESTED = ("model", "state_dict", "model_state_dict", "module")  # keys under which trainers keep the weights
WRAPPERS = ("module.", "_orig_mod.")  # what DataParallel and torch.compile put before the names of parameters
MOST_UNPACKED = 4  # times its size
ABSENT = (PRETEXT, "relative.")  # may be absent from a checkpoint, and start as they are built


@dataclass(frozen=True)
class Origin:
    """What trained a checkpoint.

    Attributes:
        objective: the entry of --objective.
        model: name of the model, with its variant.
        sha256: digest of the other entries and the tensors (`digest_of`); "" in files from before there was one.
    """

    objective: str
    model: str
    sha256: str = ""

    @classmethod
    def of(cls, objective: str, model: str, state: Mapping[str, Tensor]) -> Origin:
        """With the digest of these weights."""
        return cls(objective, model, digest_of(objective, model, state))


def digest_of(objective: str, model: str, state: Mapping[str, Tensor]) -> str:
    """SHA-256 of weights with their names, types and shapes, and of how they were trained."""
    found = hashlib.sha256(json.dumps([objective, model]).encode())
    for name, tensor in sorted(state.items()):
        found.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def load_weights(module: nn.Module, *, name: str, source: str, timm_name: str | None, seed: int) -> str:
    """Load weights from `source` into `module` and return a description of their origin.

    Args:
        module: the model, with random weights.
        name: its name with the variant.
        source: "random", "timm", "auto" (the shipped weights, else random), "long" (those of a longer training), or the
            path of a .safetensors, .pt or .pth state dict.
        timm_name: name of timm's weights for this architecture, or None.
        seed: of the random weights, for the description.

    Raises:
        UsageError: a missing file (also one that this package ships with), weights that cannot be downloaded, or a
            shape that does not fit.
    """
    shipped = shipped_weights(name, source)
    if source == "random" or (source == "auto" and shipped is None):
        return f"random (seed {seed}), NOT TRAINED"
    if source == "timm":
        return _fit(module, _timm_state(timm_name, name), f"timm {timm_name}")
    path = shipped or Path(source)
    label, state = path.name if shipped is None else f"shipped {path.name}", read_state(path)
    origin = read_origin(path)
    if origin and origin.objective != SUPERVISED:
        label += f", trained by {origin.objective}"
    return _fit(module, state, label)


def read_origin(path: Path) -> Origin | None:
    """How the weights of a model.safetensors of `fedmjp.train` were trained; None for files that do not say.

    Raises:
        UsageError: what the file says cannot be read.
    """
    if path.suffix != ".safetensors":
        return None
    with safe_open(path, "pt") as file:
        content = (file.metadata() or {}).get(ORIGIN)
    try:
        return Origin(**json.loads(content)) if content else None
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path} is damaged: its {ORIGIN!r} entry cannot be read; restore it") from error


def shipped_names(source: str = "auto") -> list[str]:
    """Names of the models whose weights `source`, an entry of `SHIPPED_WEIGHTS`, are included in the package."""
    ending = f"{SHIPPED_WEIGHTS[source]}.safetensors"
    names = (path.name.removesuffix(ending) for path in SHIPPED.glob(f"*{ending}"))
    return sorted(name for name in names if "." not in name)


def shipped_weights(name: str, source: str) -> Path | None:
    """The file of a model's weights in the package; None for another source, and for "auto" of a model without.

    Raises:
        UsageError: "long" of a model that has none, or a copy of the package without the file, as app bundles are: the
            model would run untrained.
    """
    if source not in SHIPPED_WEIGHTS:
        return None
    path = SHIPPED / f"{name}{SHIPPED_WEIGHTS[source]}.safetensors"
    if path.exists():
        return path
    if path.with_suffix(".md").exists():
        raise UsageError(
            f"this copy of FedMJP lacks the weights of {name} that it should hold ({path.name}); install FedMJP from "
            "its repository, or pass --weights random"
        )
    if source != "auto":
        has = ", ".join(shipped_names(source))
        raise UsageError(f"no weights {source!r} of {name} ship; pass --weights auto, or choose from: {has}")
    return None


def classes_of(name: str, source: str) -> int | None:
    """Number of classes of the weights of model `name`, or None if they are random, timm's, or have no known head.

    Args:
        name: of the model, with its variant.
        source: see `load_weights`.

    Raises:
        UsageError: the file is missing or damaged.
    """
    shipped = shipped_weights(name, source)
    if source in ("random", "timm") or (source == "auto" and shipped is None):
        return None
    state = read_state(shipped or Path(source))
    head = next((state[k] for k in ("head.weight", "fc.weight", f"{PRETEXT}classify.weight") if k in state), None)
    return None if head is None else len(head)


def _timm_state(timm_name: str | None, name: str) -> dict[str, Tensor]:
    if timm_name is None:
        raise UsageError(f"timm publishes no weights for {name!r}; pass --weights random or a checkpoint's path")
    try:
        return timm.create_model(timm_name, pretrained=True).state_dict()
    except Exception as error:  # the hub's client raises many kinds of errors, which all have the same cause for a user
        raise UsageError(
            f"timm's weights of {timm_name} are neither cached nor reachable ({type(error).__name__}); "
            "download them where there is a network, or pass --weights random or a checkpoint's path"
        ) from error


def read_state(path: Path) -> dict[str, Tensor]:
    """The state dict in a .safetensors, .pt or .pth file, as people keep them: by itself, or beside other things.

    What is not a tensor is left out, and so are the names of wrappers (`module.`, `_orig_mod.`).

    Raises:
        UsageError: no such file, one that cannot be read, is not as it was written or unpacks to far more than its
            size, one without tensors by name, or one with NaN or infinity in them.
    """
    if not path.is_file():
        raise UsageError(f"no checkpoint at {path}; pass --weights random, timm, auto, long or a file's path")
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
            _refuse_changed(path, state)
        else:
            _refuse_bomb(path)
            state = torch.load(path, map_location="cpu", weights_only=True)
    except UsageError:
        raise
    except Exception as error:  # the readers raise many kinds of errors for a damaged file
        words = (str(error).splitlines() or [""])[0][:80]
        raise UsageError(f"{path} is not a readable checkpoint ({type(error).__name__}: {words})") from error
    return _checked(_inner(state), path)


def _refuse_changed(path: Path, state: Mapping[str, Tensor]) -> None:
    """Raise `UsageError` for weights of `fedmjp.train` that are not as they were written."""
    origin = read_origin(path)
    if origin and origin.sha256 and origin != Origin.of(origin.objective, origin.model, state):
        raise UsageError(f"{path} is damaged: its weights are not as they were written (digest); restore it")


def _refuse_bomb(path: Path) -> None:
    """Raise `UsageError` for an archive whose content is far larger than the file; torch does not compress tensors."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > MOST_UNPACKED * path.stat().st_size:
        raise UsageError(f"{path} unpacks to {unpacked / 1e6:.0f} MB, far more than its size; it is no checkpoint")


def _inner(state: Any) -> Any:
    """The state dict within what trainers save beside optimiser and epoch."""
    for key in NESTED:
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            return _inner(state[key])
    return state


def _checked(state: Any, path: Path) -> dict[str, Tensor]:
    tensors = state.items() if isinstance(state, Mapping) else ()
    found = {bare_name(str(name)): t for name, t in tensors if isinstance(t, Tensor)}
    if not found:
        raise UsageError(f"{path} holds no tensors by name; pass what torch.save(model.state_dict(), PATH) writes")
    for name, tensor in found.items():
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():  # expanded: 4 GB of 1 kB
            raise UsageError(f"{path}: {name} has more entries than the file holds; save it by tensor.contiguous()")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise UsageError(
                f"{path}: {name} holds NaN or infinity; pass the weights of a training that has not diverged"
            )
    return found


def bare_name(name: str) -> str:
    """A parameter's name without those of the wrappers around its module (`WRAPPERS`)."""
    for wrapper in WRAPPERS:
        name = name.replace(f".{wrapper}", ".")
    while name.startswith(WRAPPERS):
        name = name.partition(".")[2]
    return name


def _fit(module: nn.Module, state: dict[str, Tensor], label: str) -> str:
    """Load a state dict. A head for other classes stays random, as the returned description says.

    Raises:
        UsageError: any other parameter is missing, unknown or has another shape.
    """
    own = module.state_dict()
    state = {k: v.float() if v.is_floating_point() else v for k, v in state.items()}
    head = [k for k in own if k.split(".")[0] in {"head", "fc"} and k in state and state[k].shape != own[k].shape]
    for key in head:
        del state[key]
    extra = [k for k in state if k not in own and not k.startswith((*MJP_ONLY, *_superfluous(module)))]
    missing = [k for k in own if k not in state and k not in head and not k.startswith((*MJP_ONLY, *ABSENT))]
    wrong = [k for k in own if k in state and state[k].shape != own[k].shape]
    if wrong:
        key = wrong[0]
        advice = "; pass the --image-size that it was trained at" if key == "pos_embed" else ""
        raise UsageError(
            f"{label} does not fit: {key} is {tuple(state[key].shape)}, the model has {tuple(own[key].shape)}{advice}"
        )
    if missing or extra:
        example = (missing or extra)[0]
        raise UsageError(
            f"{label} does not fit: {len(missing)} parameters missing, {len(extra)} unknown (for example {example})"
        )
    fresh = [k for k in own if k not in state and k not in head]
    module.load_state_dict({k: state[k] for k in own if k in state}, strict=False)
    notes = ["head random"] if head else []
    notes += ["unknown position random"] if "unk_embed" in fresh else []
    notes += ["table of origins random"] if "idx_embed" in fresh else []
    notes += ["DAL map random"] if any(k.startswith("dal.") for k in fresh) else []
    notes += ["pretext head random"] if any(k.startswith(PRETEXT) for k in fresh) else []
    notes += ["relative positions zero"] if any(k.startswith("relative.") for k in fresh) else []
    return label + (f" ({', '.join(notes)})" if notes else "")


def _superfluous(module: nn.Module) -> tuple[str, ...]:
    """Beginnings of names that a checkpoint may hold although the module has no use for them."""
    found = ("pos_embed",) if "pos_embed" not in dict(module.named_parameters()) else ()
    return (*found, "cls_token", "head.") if hasattr(module, PRETEXT.rstrip(".")) else found
