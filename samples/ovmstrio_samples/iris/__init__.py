"""A tabular classifier: the species of an iris by the sizes of its leaves."""
