"""A language model that chats over OpenAI's API."""
