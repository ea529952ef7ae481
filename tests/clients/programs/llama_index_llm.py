"""LlamaIndex's model and embeddings for servers that are like OpenAI's."""

from typing import Literal

from arguments import REST
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

SERVER = {"api_base": f"http://{REST}/v3", "api_key": "none", "max_retries": 0}


def weather(city: Literal["Paris", "Berlin"]) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


options = {**SERVER, "model": "chat", "max_tokens": 150, "temperature": 0, "context_window": 2048}
chat = OpenAILike(**options, is_chat_model=True, is_function_calling_model=True)
messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="hello")]
assert chat.chat(messages).message.content
assert list(chat.stream_chat(messages))
assert chat.complete("hello").text
tool = FunctionTool.from_defaults(weather)
called = chat.chat_with_tools([tool], user_msg="How is Paris?", tool_required=True)
assert chat.get_tool_calls_from_response(called)[0].tool_kwargs["city"] in {"Paris", "Berlin"}
assert OpenAILike(**options, is_chat_model=False).complete("hello").text
embeddings = OpenAILikeEmbedding(**SERVER, model_name="words")
assert len(embeddings.get_text_embedding_batch(["a cat", "a dog"])) == 2
