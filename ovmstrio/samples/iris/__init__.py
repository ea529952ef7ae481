"""Sample iris: a tabular classifier of the species of a flower by its sizes."""
