"""Speech to text for OpenAI's clients: any language model of sound that openvino-genai reads."""
