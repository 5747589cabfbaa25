"""The training of the predictor of places."""
