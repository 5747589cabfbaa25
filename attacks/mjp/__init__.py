"""Attacks on clients under Masked Jigsaw Puzzle: from one update, over rounds, and with masked patches separated."""
