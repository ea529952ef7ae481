"""Sample pitch: note detection with one model in three formats."""
