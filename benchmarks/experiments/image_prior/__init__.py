"""The fit of the mixture on patches."""
