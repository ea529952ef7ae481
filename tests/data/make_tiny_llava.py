"""Write ``tiny_llava.tar.xz``: a LLaVA of seeded weights as OpenVINO's IR, whose answers are noise.

    python tests/data/make_tiny_llava.py    # with torch, transformers, optimum-intel and openvino-tokenizers

An image of any size has 16 tokens. The other tokens are all bytes, and the marks of ChatML.
"""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
from pathlib import Path

import openvino as ov
import torch
from openvino_tokenizers import convert_tokenizer
from optimum.exporters.openvino import main_export
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

MARKS = ("<|im_start|>", "<|im_end|>", "<pad>", "<image>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 2048
PIXELS = 56


def make_tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*MARKS, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    begin, end, padding, image = MARKS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=begin,
        eos_token=end,
        pad_token=padding,
        additional_special_tokens=[image],
        chat_template=TEMPLATE,
        model_max_length=CONTEXT,
    )


def make_model(vocabulary: int) -> LlavaForConditionalGeneration:
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=PIXELS,
        patch_size=14,
        projection_dim=32,
    )
    text = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=3,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_seq_length=16,
    )
    model = LlavaForConditionalGeneration(config).eval()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "norm" in name:
                continue
            # Five levels per tensor compress well. The prefix cache compares two numbers of a token's embedding.
            levels = torch.randint(-2, 3, weights.shape, generator=random).float()
            if "embed_tokens" in name:
                levels = torch.randn(weights.shape, generator=random).half().float()
            inputs = weights[0].numel() if weights.dim() > 1 and "embed_tokens" not in name else 1
            scale = 3.0 if "lm_head" in name else 0.5 if "embed_tokens" in name else 1.0 if inputs > 1 else 0.02
            weights.copy_(levels * scale * 0.7 / inputs**0.5)
    return model


def write_folder(folder: Path) -> None:
    tokenizer = make_tokenizer()
    with tempfile.TemporaryDirectory() as source:
        make_model(len(tokenizer)).save_pretrained(source)
        images = CLIPImageProcessor(
            size={"shortest_edge": PIXELS}, crop_size={"height": PIXELS, "width": PIXELS}, do_convert_rgb=True
        )
        LlavaProcessor(
            image_processor=images,
            tokenizer=tokenizer,
            patch_size=14,
            vision_feature_select_strategy="default",
            chat_template=TEMPLATE,
            num_additional_image_tokens=1,
        ).save_pretrained(source)
        main_export(source, folder, task="image-text-to-text", library_name="transformers")
    for model, name in zip(
        convert_tokenizer(tokenizer, with_detokenizer=True), ("tokenizer", "detokenizer"), strict=True
    ):
        ov.save_model(model, folder / f"openvino_{name}.xml")


def write_archive(folder: Path, target: Path) -> None:
    with tarfile.open(target, "w:xz") as archive:
        for file in sorted(folder.iterdir()):
            data = file.read_bytes()
            if file.suffix == ".json":
                data = json.dumps(json.loads(data)).encode()
            entry = tarfile.TarInfo(file.name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        write_folder(Path(made))
        write_archive(Path(made), Path(__file__).with_name("tiny_llava.tar.xz"))
