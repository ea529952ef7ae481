"""What every call passes on its way to a service: look-up, admission, observation."""
