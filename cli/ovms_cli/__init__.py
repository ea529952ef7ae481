"""The `ovms` command."""
