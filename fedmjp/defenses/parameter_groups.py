"""Parameters of a model by name: groups that clients are known to freeze or to train alone, and patterns.

An entry is the name of a group, a pattern of parameter names as the shell writes them (`blocks.?.mlp.*`; "*" stands
for dots too), or "all_but_" and one of these. The names are timm's, of the models in `fedmjp.models`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from attacks.registry import UsageError

ALL_BUT = "all_but_"
# Group -> patterns of names, of ViTs, Swin and ResNets.
GROUPS: dict[str, tuple[str, ...]] = {
    "positions": ("pos_embed", "unk_embed", "idx_embed"),
    "patch_projection": ("patch_embed.proj.*",),
    "first_attention": ("blocks.0.attn.qkv.*", "layers.0.blocks.0.attn.qkv.*"),
    "first_block": ("blocks.0.*", "layers.0.blocks.0.*", "layer1.0.*"),
    "biases": ("*.bias",),
    "norms": ("*norm*", "*bn?.*", "*downsample.1.*"),
    "head": ("head.*", "fc.*"),
}


def belongs(name: str, entries: Iterable[str]) -> bool:
    """Whether the parameter called `name` is one that an entry stands for."""
    return any(_stands_for(entry, name) for entry in entries)


def _stands_for(entry: str, name: str) -> bool:
    if entry.startswith(ALL_BUT):
        return not _stands_for(entry.removeprefix(ALL_BUT), name)
    return any(fnmatchcase(name, pattern) for pattern in GROUPS.get(entry, (entry,)))


def check_entries(entries: Iterable[str], names: Collection[str], option: str) -> None:
    """Check that every entry stands for a parameter of a model.

    Args:
        entries: see the module.
        names: of the model's parameters.
        option: of the command line, for the message.

    Raises:
        UsageError: an entry stands for none.
    """
    for entry in entries:
        if not any(_stands_for(entry, name) for name in names):
            some = ", ".join(list(names)[:3])
            raise UsageError(
                f"{option} {entry} is no parameter of the model; choose from {', '.join(GROUPS)}, {ALL_BUT}GROUP, or a "
                f"pattern of its parameters' names ({some}, ...)"
            )
