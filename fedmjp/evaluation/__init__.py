"""Evaluation of a model on test images: accuracy, and consistency of its predictions under jigsaws."""
