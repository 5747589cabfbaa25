"""The encoder of a checkpoint, for fine-tuning: heads are dropped, and what the checkpoint lacks stays as it was built.

`fedmjp.training` writes into the metadata of its checkpoints which objective trained them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from attacks.registry import UsageError
from fedmjp.models.weights import PRETEXT, read_origin, read_state

HEADS = (PRETEXT, "head.", "fc.", "dal.")
# What a pre-training may do without or replace: name or beginning -> words.
RENEWED = {
    "cls_token": "class token",
    "pos_embed": "positions",
    "unk_embed": "unknown position",
    "idx_embed": "table of origins",
    "relative.": "relative positions",
}


# What a seed is moved by where heads are drawn again: no training counts its seeds that far.
OTHER_SEEDS = 2**31


def renew_heads(module: nn.Module, path: Path, build: Callable[[int], nn.Module], seed: int) -> None:
    """Draw those heads again that the checkpoint holds, too, from another seed than the rest of the model.

    A training fits the encoder to the head that it began with. Where fine-tuning has the same seed, the new head would
    be that one: `vit_mini_32`, trained from seed 0 to 84 % on CIFAR-10, has 82 % with the untrained head of seed 0.

    Args:
        module: the model to fine-tune, changed in place.
        path: the checkpoint of its encoder.
        build: the same model from a seed.
        seed: of the module.
    """
    names = {n for n in module.state_dict() if n.startswith(HEADS)} & read_state(path).keys()
    if names:
        fresh = build(seed + OTHER_SEEDS).state_dict()
        module.load_state_dict({name: fresh[name] for name in names}, strict=False)


def load_encoder(module: nn.Module, path: Path) -> str:
    """Load blocks, patch projection and norms, and of class token and positions what the checkpoint holds and fits.

    Args:
        module: the model to fine-tune, newly built.
        path: a .safetensors, .pt or .pth state dict.

    Returns:
        Where the encoder comes from, in words for a table.

    Raises:
        UsageError: no such file, or one that holds no encoder of this architecture.
    """
    state = {n: t.float() if t.is_floating_point() else t for n, t in read_state(path).items()}
    own = {n: t for n, t in module.state_dict().items() if not n.startswith(HEADS)}
    renewed = tuple(RENEWED)
    kept = {n: t for n, t in state.items() if n in own and not (n.startswith(renewed) and t.shape != own[n].shape)}
    unknown = [n for n in state if n not in own and not n.startswith((*HEADS, *renewed))]
    missing = [n for n in own if n not in state and not n.startswith(renewed)]
    if missing or unknown:
        example = (missing or unknown)[0]
        raise UsageError(
            f"{path.name} holds no encoder of this model: {len(missing)} parameters missing, {len(unknown)} unknown "
            f"(for example {example})"
        )
    for name, tensor in kept.items():
        if tensor.shape != own[name].shape:
            raise UsageError(
                f"{path.name} holds no encoder of this model: {name} is {tuple(tensor.shape)}, not "
                f"{tuple(own[name].shape)}"
            )
    module.load_state_dict(kept, strict=False)
    new = [words for n, words in RENEWED.items() if any(o.startswith(n) and o not in kept for o in own)]
    origin = read_origin(path)
    trained = f" pre-trained by {origin.objective}" if origin else ""
    return f"encoder of {path.name}{trained} ({', '.join([*new, 'head'])} new)"
