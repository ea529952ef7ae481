"""The command ``aider``: a question about a file, answered as events."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from arguments import REST

SETTINGS = "- name: openai/chat\n  extra_params:\n    max_tokens: 20\n"
QUIET = ["--no-git", "--no-check-update", "--no-show-model-warnings", "--analytics-disable", "--no-gitignore"]

with TemporaryDirectory() as folder:
    Path(folder, "settings.yml").write_text(SETTINGS, encoding="utf-8")
    code = Path(folder, "code.py")
    code.write_text("def one():\n    return 1\n", encoding="utf-8")
    known = {"OPENAI_API_BASE": f"http://{REST}/v1", "OPENAI_API_KEY": "none", "HOME": folder}
    known["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    command = [sys.executable, "-m", "aider", "--model", "openai/chat", "--chat-mode", "ask", "--yes-always", *QUIET]
    command += ["--model-settings-file", "settings.yml", "--map-tokens", "0", "--no-pretty", "--message", "Hello"]
    options = {"cwd": folder, "env": os.environ | known, "text": True, "timeout": 110}
    done = subprocess.run(
        [*command, code.name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True, **options
    )
    assert "Added code.py to the chat" in done.stdout, done.stdout
    answer, cut, _ = done.stdout.partition("to the chat.")[2].partition("Model openai/chat has hit a token limit")
    assert answer.strip(), done.stdout
    assert cut, done.stdout
    assert "return 1" in code.read_text(encoding="utf-8")
