"""Cohere's client ranks documents."""

from __future__ import annotations

import cohere
from arguments import REST

client = cohere.ClientV2(api_key="none", base_url=f"http://{REST}")
ranked = client.rerank(model="ranks", query="the cat", documents=["the cat sat", "the dog", "red"])
assert sorted(each.index for each in ranked.results) == [0, 1, 2]
assert ranked.results[0].relevance_score >= ranked.results[-1].relevance_score
assert len(client.rerank(model="ranks", query="a", documents=["b", "c"], top_n=1).results) == 1
