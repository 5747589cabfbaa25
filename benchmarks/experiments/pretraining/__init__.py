"""Pre-trainings without labels: DropPos' position accuracy in cases other than its training's, and MST's tables."""
