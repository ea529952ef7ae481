"""Configuration files and options as validated values: located documents, findings and service specifications."""
