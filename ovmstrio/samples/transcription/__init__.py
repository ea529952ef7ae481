"""Sample transcription: speech to text for OpenAI's clients, with Whisper."""
