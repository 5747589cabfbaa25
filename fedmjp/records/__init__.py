"""What is written down of a run and how it is taken up again: rows, run folder, provenance."""
