"""The patches of one update whose positions are hidden, up to their order and placed."""
