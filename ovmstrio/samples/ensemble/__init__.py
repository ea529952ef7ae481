"""Sample ensemble: two classifiers whose votes are combined."""
