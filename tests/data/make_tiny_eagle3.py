"""Write ``tiny_eagle3.tar.xz``: a model of ten small layers and an EAGLE-3 draft model, as Optimum exports them.

    python tests/data/make_tiny_eagle3.py    # with torch, transformers, optimum-intel and einops

The vocabulary is that of ``tests.support.tiny_llm``, whose
tokenizer files a test adds. Weights have three values each, so that they compress.
"""

from __future__ import annotations

import json
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from optimum.exporters.openvino import main_export
from optimum.exporters.openvino.model_patcher import LlamaEagle3ForCausalLM
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 267, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip


def simplify(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randint(-1, 2, parameter.shape) * 0.25)


def export(folder: Path, name: str) -> None:
    task = "text-generation-with-past"
    main_export(str(folder / name), folder / "ov" / name, task=task, convert_tokenizer=False, trust_remote_code=True)


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=10, **SIZES))
        simplify(target)
        target.save_pretrained(folder / "target")
        config = LlamaConfig(num_hidden_layers=1, **SIZES)
        config.draft_vocab_size = SIZES["vocab_size"]
        draft = LlamaEagle3ForCausalLM(config)
        simplify(draft)
        (folder / "draft").mkdir()
        weights = {name.removeprefix("model."): each.contiguous() for name, each in draft.state_dict().items()}
        save_file(weights, folder / "draft" / "model.safetensors", metadata={"format": "pt"})
        document = {**config.to_dict(), "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
        (folder / "draft" / "config.json").write_text(json.dumps(document))
        for name in ("target", "draft"):
            export(folder, name)
        with tarfile.open(Path(__file__).with_name("tiny_eagle3.tar.xz"), "w:xz", preset=9) as archive:
            for file in sorted((folder / "ov").glob("*/*")):
                if file.name in {"openvino_model.xml", "openvino_model.bin", "config.json", "generation_config.json"}:
                    archive.add(file, f"{file.parent.name}/{file.name}")


if __name__ == "__main__":
    main()
