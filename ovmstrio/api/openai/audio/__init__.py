"""Speech in OpenAI's API."""
