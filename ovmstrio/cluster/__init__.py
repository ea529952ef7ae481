"""Servers on many machines, by engines that exist: a configuration as groups of services, which the engine places."""
