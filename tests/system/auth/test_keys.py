from __future__ import annotations

import json
from pathlib import Path

import httpx

from tests.support import ir
from tests.support.processes import OvmsProcess, run_ovms, serving
from tests.support.system_servers import write_config
from tests.support.waits import WAIT_SECONDS, until

MODEL = "/v2/models/add"


def _new_key(file: Path, *arguments: str) -> str:
    made = run_ovms("keys", "new", *arguments, "--file", str(file))
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


def _status(server: OvmsProcess, key: str, path: str = MODEL) -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.get(server.rest + path, headers=headers, timeout=WAIT_SECONDS).status_code


def test_keys_are_added_and_removed_and_stay_secret(tmp_path: Path) -> None:
    """The test changes the keys of its server, so the server is its own."""
    keys = tmp_path / "keys.json"
    shop = _new_key(keys, "shop", "--scope", "infer:add")
    boss = _new_key(keys, "boss", "--scope", "admin", "--scope", "metrics")
    config = write_config(tmp_path, {"name": "add", "base_path": str(ir.save(ir.dummy(), tmp_path / "models", "add"))})
    options = ("--config_path", str(config), "--keys_file", str(keys), "--log_level", "TRACE")
    secrets, seen = [shop, boss, "Zm9yZ2VkIHNlY3JldA"], []
    with serving(*options, log=tmp_path / "log") as server:
        assert [_status(server, key) for key in ("", secrets[2], shop, boss)] == [401, 401, 200, 200]
        assert [_status(server, key, "/v1/config") for key in (shop, boss)] == [403, 200]
        for key in secrets:
            headers = {"x-api-key": key}
            reloaded = httpx.post(f"{server.rest}/v1/config/reload", headers=headers, timeout=WAIT_SECONDS)
            assert reloaded.status_code == {shop: 403, boss: 200}.get(key, 401)
            seen += [reloaded.text, httpx.post(f"{server.rest}{MODEL}/infer", headers=headers, content="{").text]
        assert "authentication required" in run_ovms("models", "--url", server.grpc, timeout=120).stderr
        seen.append(httpx.get(f"{server.rest}/metrics", headers={"x-api-key": boss}).text)
        late = _new_key(keys, "late", "--scope", "read")
        until(lambda: _status(server, late) == 200)
        assert run_ovms("keys", "revoke", "shop", "--file", str(keys)).returncode == 0
        until(lambda: _status(server, shop) == 401)
        keys.write_text("{")
        until(lambda: "credentials not reloaded" in server.printed_so_far())
        assert [_status(server, key) for key in (late, shop)] == [200, 401]
        code, printed = server.stop()
    assert code == 0, printed
    assert "server changed" in printed
    assert "caller=boss" in printed
    text = "\n".join([printed, *seen, run_ovms("keys", "list", "--file", str(keys)).stdout])
    assert [secret for secret in (*secrets, late) if secret in text or secret.removeprefix("ovms_") in text] == []


def test_a_check_locates_problems_of_the_key_file(tmp_path: Path) -> None:
    keys, config = tmp_path / "keys.json", write_config(tmp_path)
    keys.write_text('{"callers": [\n  {"name": "a", "scopes": ["infer"], "sha256": "x"}\n]}')
    checked = run_ovms("check", str(config), "--keys_file", str(keys), "--json", timeout=120)
    assert checked.returncode == 1
    problems = [(each["file"], each["line"]) for each in json.loads(checked.stdout)["problems"]]
    assert set(problems) == {(str(keys), 2)}
