"""Sample voice: text to speech for OpenAI's clients, with a Piper voice."""
