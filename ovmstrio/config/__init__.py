"""Every file and option that a user writes, read into the validated values of `specs`."""
