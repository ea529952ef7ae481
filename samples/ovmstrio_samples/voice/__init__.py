"""Text to speech for OpenAI's clients: any voice of Piper, and what openvino-genai reads."""
