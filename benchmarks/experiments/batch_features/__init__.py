"""The features of a batch, from the gradient of the classifier alone."""
