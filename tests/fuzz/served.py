"""What is fuzzed: a service of every kind whose code answers whatever it is given, and models of other shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support import ir
from tests.support.all_kinds import ANY_HANDLER, ANY_OPS, write_all_kinds
from tests.support.tiny_llm import write_tiny_folder


def write_fuzzed(folder: Path) -> Path:
    """Write everything into a folder; gives the configuration's path."""
    config = write_all_kinds(folder, handler=ANY_HANDLER, ops=ANY_OPS)
    models: dict[str, tuple[Any, dict[str, Any]]] = {
        "dynamic": (ir.dynamic(), {}),
        "strings": (ir.string_passthrough(), {}),
        "stateful": (ir.accumulator(), {"stateful": True, "max_sequence_number": 50}),
    }
    document = json.loads(config.read_text())
    document["model_config_list"] += [
        {"config": {"name": name, "base_path": str(ir.save(model, folder / "repository", name)), **options}}
        for name, (model, options) in models.items()
    ]
    text_model = {"name": "chat", "base_path": str(write_tiny_folder(folder / "chat")), "max_tokens_limit": 50}
    document["text_model_config_list"] = [{"config": text_model}]
    config.write_text(json.dumps(document, indent=1))
    return config
