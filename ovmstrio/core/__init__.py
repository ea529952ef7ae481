"""Values and ports that every layer speaks of: tensors, requests, errors, services, events; no I/O."""
