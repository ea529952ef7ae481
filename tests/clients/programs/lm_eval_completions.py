"""Requests of lm-evaluation-harness for completions and chats: probabilities of choices, and texts."""

from __future__ import annotations

import json

from arguments import REST
from lm_eval.api.instance import Instance
from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI


def instances(kind: str, *asked: tuple) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(asked)]


options = {"model": "chat", "tokenizer_backend": None, "tokenized_requests": False, "max_retries": 1}
completions = LocalCompletionsAPI(base_url=f"http://{REST}/v3/completions", **options, max_length=2000)
until = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
texts = completions.generate_until(instances("generate_until", ("hello", until), ("the inn", until)))
assert len(texts) == 2
chat = LocalChatCompletion(base_url=f"http://{REST}/v3/chat/completions", **options)
asked = json.dumps([{"role": "user", "content": "hello"}])
assert chat.model_call([JsonChatStr(asked)], generate=True, gen_kwargs=until)["choices"]
completions.tokenized_requests = True
answer = completions.model_call([[5, 6, 7], [5, 6, 8]], generate=False)
scores = completions.parse_logprobs(answer, tokens=[[5, 6, 7], [5, 6, 8]], ctxlens=[2, 2])
assert [score < 0 for score, _ in scores] == [True, True]
