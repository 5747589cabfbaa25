"""Attacks that invert a gradient by solving linear equations; none of them knows of a defence."""
