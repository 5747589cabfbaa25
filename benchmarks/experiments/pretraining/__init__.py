"""Pre-training on places: position accuracy of DropPos under other ratios than those of its training."""
