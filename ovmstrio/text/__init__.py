"""Text models: language, embedding, rerank and speech models in engine processes."""
