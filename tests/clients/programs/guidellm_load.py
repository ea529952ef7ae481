"""The command ``guidellm``: chats side by side, and what it makes of their events and usage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from arguments import REST

REQUESTS = 6

with TemporaryDirectory() as folder:
    data, report = Path(folder, "prompts.jsonl"), Path(folder, "report.json")
    prompts = [{"prompt": f"Tell of {number} gulls."} for number in range(REQUESTS)]
    data.write_text("\n".join(map(json.dumps, prompts)), encoding="utf-8")
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target=http://{REST},model=chat"]
    command += ["--profile", "kind=concurrent,streams=3", "--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--data", f"kind=json_file,path={data}", "--output", f"kind=json,path={report}"]
    subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=True, timeout=110)
    (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
requests, counts = benchmark["metrics"]["request_totals"], benchmark["metrics"]["output_token_count"]["successful"]
assert (requests["successful"], requests["errored"]) == (REQUESTS, 0)
assert (counts["count"], counts["min"] > 0) == (REQUESTS, True)
