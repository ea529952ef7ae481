"""Other servers with the same models, settings and load, each in an environment of its own, in turn with this one."""
