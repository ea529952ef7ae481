"""Embeddings, ranks and tokens by OpenAI's client and plain HTTP."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError, OpenAI

from tests.support.served_in_thread import serving_in_thread
from tests.support.tiny_encoders import TinyEncoder, word_pieces, write_embedder, write_reranker

_TEXTS = ("the cat sat.", "red house", "A dog ran, the cats sat!")


def _vector(text: str) -> Any:
    ids = [int(number) for number in word_pieces().encode([text], 100)["input_ids"][0]]
    mean = TinyEncoder().hidden(ids).mean(0)
    return mean / np.linalg.norm(mean)


def _ask(url: str, texts: tuple[str, ...], failures: list[Any]) -> None:
    """Ask several times, and note answers that are not right."""
    with OpenAI(base_url=f"{url}/v3", api_key="unused") as client:
        for text in (*texts, *texts):
            made = client.embeddings.create(model="words", input=text).data[0].embedding
            if not np.allclose(made, _vector(text), atol=1e-5):
                failures.append((text, made))


def test_clients_get_embeddings_and_ranks(tmp_path: Path) -> None:
    """Texts of several clients share batches; a text that is too long is an error of the client's class."""
    write_reranker(tmp_path / "rank", write_embedder(tmp_path / "words"))
    entries = [
        {"name": "words", "base_path": "words", "task": "embeddings", "pooling": "MEAN"},
        {"name": "rank", "base_path": "rank", "task": "rerank"},
    ]
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"model_config_list": [], "text_model_config_list": [{"config": each} for each in entries]})
    )
    failures: list[Any] = []
    with serving_in_thread(config_path=config) as server:
        clients = [threading.Thread(target=_ask, args=(f"http://{server.http}", _TEXTS, failures)) for _ in range(4)]
        for each in clients:
            each.start()
        for each in clients:
            each.join(120)
        with OpenAI(base_url=f"http://{server.http}/v3", api_key="unused") as client:
            several = client.embeddings.create(model="words", input=[*_TEXTS], encoding_format="float")
            with pytest.raises(BadRequestError, match="Input length 32 longer than allowed 20") as refused:
                client.embeddings.create(model="words", input="the " * 30)
        body = {"model": "rank", "query": "red cat", "documents": [*_TEXTS], "top_n": 2}
        ranked = server.ask("POST", "/v2/rerank", json=body).json()
        tokens = server.ask("POST", "/v3/tokenize", json={"model": "words", "text": "red"}).json()

    assert failures == []
    assert np.allclose([each.embedding for each in several.data], [_vector(text) for text in _TEXTS], atol=1e-5)
    assert refused.value.code == "context_length_exceeded"
    scores = [each["relevance_score"] for each in ranked["results"]]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 2
    assert tokens == {"tokens": [int(number) for number in word_pieces().encode(["red"], 9)["input_ids"][0]]}
