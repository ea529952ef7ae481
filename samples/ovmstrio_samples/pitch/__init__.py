"""Which notes sound, by one model in three formats."""
