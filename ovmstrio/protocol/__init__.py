"""Messages of the wire protocols: typed classes in ``generated``, their descriptors in ``descriptors``."""
