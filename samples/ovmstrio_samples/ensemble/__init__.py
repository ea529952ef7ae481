"""Two classifiers that vote."""
