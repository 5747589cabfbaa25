"""The fit of the confidence of completed patches."""
