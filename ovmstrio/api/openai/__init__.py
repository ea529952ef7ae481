"""OpenAI's API over REST, below ``/v3``, ``/v1`` and ``/v3/v1``."""
