"""Configuration of handler projects: ``nucleus.yaml``, environment files and container images."""
