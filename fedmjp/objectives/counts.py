"""How many patches a ratio leaves; without torch, for the checks of options."""

from __future__ import annotations

import math


def count_kept(total: int, dropped: float, *, rounds_up: bool) -> int:
    """(1 - dropped) * total as a whole number; products that are whole but for round-off are not rounded further."""
    exact = round((1 - dropped) * total, 9)
    return math.ceil(exact) if rounds_up else math.floor(exact)
