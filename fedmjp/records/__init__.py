"""Records of a run, from which it can be resumed: rows, run folder, provenance."""
