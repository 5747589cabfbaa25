"""Measures of a model on test images: accuracy, and consistency under jigsaws."""
