"""The command ``llm``, with the server's model among its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from arguments import REST

MODEL = """
- model_id: served
  model_name: chat
  api_base: "http://{}/v3"
  supports_schema: true
  supports_tools: true
"""

with TemporaryDirectory() as folder:
    Path(folder, "extra-openai-models.yaml").write_text(MODEL.format(REST), encoding="utf-8")
    known = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}

    def ask(*arguments: str) -> str:
        command = [sys.executable, "-m", "llm", *arguments, "-m", "served", "-o", "max_tokens", "40"]
        done = subprocess.run(command, env=known, check=True, capture_output=True, text=True, timeout=60)
        return done.stdout

    assert ask("hello")
    assert ask("hello", "--no-stream", "-s", "Be brief.")
    assert ask("and?", "-c")
    assert "yes" in ask(
        "hello", "--schema", '{"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}'
    )
