"""From an update to scored rows: what the adversary is shown, what it found, how close it came."""

from fedmjp.audit.user_model import Watcher, audit_gradient

__all__ = ["Watcher", "audit_gradient"]
