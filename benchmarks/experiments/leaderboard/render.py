"""What is rendered from the submissions in results/leaderboard: the same text as `fedmjp-leaderboard render` writes."""

from __future__ import annotations

from experiments.rendering import Rendering
from fedmjp.leaderboard.page import BLOCKS

RENDERINGS = (Rendering("leaderboard", blocks=BLOCKS),)
