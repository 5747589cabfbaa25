"""Defences by name. Importing the package registers every one."""

from fedmjp.defenses import frozen_positions, mjp, noise, spp  # noqa: F401  (importing a defence registers it)
from fedmjp.defenses.base import DEFENSES, ClientInput, Defense

__all__ = ["DEFENSES", "ClientInput", "Defense"]
