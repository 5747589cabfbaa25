"""Attacks that invert a gradient by solving linear equations; none of them takes a defence into account."""
