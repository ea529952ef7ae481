"""The server: settings, plan, life cycle from start to drain, listeners and front ends."""
