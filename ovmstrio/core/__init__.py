"""Values that every layer uses: tensors, requests, errors, call events and service protocols."""
