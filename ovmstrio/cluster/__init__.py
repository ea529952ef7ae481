"""Servers on several machines: a configuration as groups of services, placed by Ray Serve or Kubernetes."""
