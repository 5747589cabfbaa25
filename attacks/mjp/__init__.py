"""Attacks that know Masked Jigsaw Puzzle: from one update, over rounds, and piece by piece."""
