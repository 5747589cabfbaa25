"""What is rendered from the rows of Flower's own mods."""

from __future__ import annotations

from experiments.rendering import Rendering
from experiments.simulate.render import rounds_block, rounds_files

FLOWER_MODS = Rendering("flower_mods", rounds_files, {"flower_mods": rounds_block})
RENDERINGS = (FLOWER_MODS,)
