"""From an update to scored rows: what the adversary is shown, what it found, how close it came."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attacks.lazy import lazy_exports

if TYPE_CHECKING:
    from fedmjp.audit.user_model import audit_gradient
    from fedmjp.audit.watcher import Watcher

__all__ = ["Watcher", "audit_gradient"]

__getattr__ = lazy_exports(
    __name__, {"fedmjp.audit.user_model": ("audit_gradient",), "fedmjp.audit.watcher": ("Watcher",)}
)
