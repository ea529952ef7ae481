"""DSPy's language model, through LiteLLM."""

from __future__ import annotations

import dspy
from arguments import REST

model = dspy.LM("openai/chat", api_base=f"http://{REST}/v3", api_key="none", max_tokens=40, num_retries=0, cache=False)
assert model("hello")
assert model(messages=[{"role": "user", "content": "hello"}], n=2, temperature=1.0)
