"""``penstock launch`` with agents that write down what they were given: real processes, and a real service's routes.

The service is a small HTTP server that names a model, except where ``tests/cluster/test_run_and_launch.py`` has a real
one: what is launched does not depend on who answers.
"""

from __future__ import annotations

import http.server
import json
import os
import pty
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.agents import AGENTS

AGENT = """\
#!{python}
import json, os, signal, sys, time
from pathlib import Path
files = {{}}
for word in sys.argv[1:]:
    if word.startswith("/") and os.path.isfile(word):
        files[word] = [Path(word).read_text(), oct(os.stat(word).st_mode & 0o777)]
found = dict(words=sys.argv[1:], environ=dict(os.environ), files=files, tty=os.isatty(0), typed="")
found["sigint"] = str(signal.getsignal(signal.SIGINT))
mode = os.environ.get("FAKE_AGENT", "")
if mode == "reads":
    found["typed"] = input()
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(os.environ["FAKE_AGENT_RECORD"] + ".new").write_text(json.dumps(found))
os.replace(os.environ["FAKE_AGENT_RECORD"] + ".new", os.environ["FAKE_AGENT_RECORD"])
if mode in ("waits", "deaf"):
    while True:
        time.sleep(1)
if mode == "killed":
    os.kill(os.getpid(), signal.SIGSEGV)
sys.exit(7 if mode == "fails" else 0)
"""


class Models(http.server.BaseHTTPRequestHandler):
    """Answers ``/v1/models`` like a service with the key "secret-key"."""

    context = 65_536

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        card = {"id": "org/coder", "object": "model", "max_model_len": self.context}
        known = self.headers["Authorization"] == "Bearer secret-key" and self.path == "/v1/models"
        body = json.dumps({"data": [card, {"id": "other", "max_model_len": 4096}]} if known else {}).encode()
        self.send_response(200 if known else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Models) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


class Launches:
    """Runs ``penstock launch`` for a user with a home of their own and fake agents on PATH."""

    def __init__(self, folder: Path, url: str) -> None:
        self.home, self.bin, self.tmp = folder / "home", folder / "bin", folder / "tmp"
        self.record = folder / "record.json"
        for made in (self.home, self.bin, self.tmp):
            made.mkdir()
        for agent in AGENTS.values():
            path = self.bin / agent.executable
            path.write_text(AGENT.format(python=sys.executable))
            path.chmod(0o755)
        (self.home / ".codex").mkdir()
        (self.home / ".codex" / "config.toml").write_text('model = "mine"\n')
        self.environ = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(self.home),
            "TMPDIR": str(self.tmp),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PENSTOCK_URL": url,
            "PENSTOCK_API_KEY": "secret-key",
            "FAKE_AGENT_RECORD": str(self.record),
        }

    @staticmethod
    def command(*words: str) -> list[str]:
        return [sys.executable, "-m", "penstock", "launch", *words]

    def run(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*words), env=self.environ | environ, capture_output=True, text=True, timeout=90, check=False
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def found(self) -> dict[str, Any]:
        """What the agent has written down."""
        return json.loads(self.record.read_text())

    def wait_for_agent(self) -> None:
        deadline = time.monotonic() + 60
        while not self.record.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def everything(self) -> dict[str, tuple[int, bytes]]:
        """All that lies in the home, among the temporary files, and in the current folder."""
        paths = [path for root in (self.home, self.tmp) for path in root.rglob("*")]
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in paths}


@pytest.fixture
def launches(tmp_path: Path, url: str) -> Launches:
    return Launches(tmp_path, url)


def given(environ: Mapping[str, str], *names: str) -> list[str | None]:
    return [environ.get(name) for name in names]


def test_claude_code_is_led_here_and_nowhere_else(launches: Launches) -> None:
    before = launches.everything()
    done = launches.run(
        "claude", "--", "-p", "say hello", "--", "x", ANTHROPIC_API_KEY="sk-ant", CLAUDE_CODE_USE_BEDROCK="1"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert launches.everything() == before
    found = launches.found()
    settings = found["words"][1]
    assert found["words"] == ["--settings", settings, "--model", "org/coder", "-p", "say hello", "--", "x"]
    url, environ = launches.environ["PENSTOCK_URL"], found["environ"]
    assert given(environ, "ANTHROPIC_BASE_URL", "ANTHROPIC_AUTH_TOKEN") == [url, "secret-key"]
    models = [f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU", "FABLE")]
    assert set(given(environ, "ANTHROPIC_MODEL", *models)) == {"org/coder"}
    assert given(environ, "ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK") == [None, None]
    assert given(environ, "CLAUDE_CODE_ATTRIBUTION_HEADER", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC") == ["0", "1"]
    assert given(environ, "CLAUDE_CODE_MAX_OUTPUT_TOKENS", "CLAUDE_CODE_AUTO_COMPACT_WINDOW") == ["16384", "100000"]
    assert environ["CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"] == "49"
    text, mode = found["files"][settings]
    assert mode == "0o600"
    assert json.loads(text)["env"].items() <= environ.items()  # the user's own settings cannot lead it elsewhere
    assert launches.run("claude", "--", "--model", "other").returncode == 0
    assert launches.found()["words"][2:] == ["--model", "other"]


def test_codex_keeps_its_configuration_but_for_some_overrides(launches: Launches) -> None:
    before = launches.everything()
    assert launches.run("codex", "--", "exec", "say hello").returncode == 0
    assert launches.everything() == before
    found = launches.found()
    url = launches.environ["PENSTOCK_URL"]
    assert found["words"] == [
        "-c", 'model_provider="penstock"',
        "-c", f'model_providers.penstock={{name="Penstock",base_url="{url}/v1",env_key="PENSTOCK_API_KEY",'
        'wire_api="responses"}',
        "-c", 'model="org/coder"',
        "-c", "model_context_window=65536",
        "-c", "model_auto_compact_token_limit=49152",
        "exec", "say hello",
    ]  # fmt: skip
    assert found["environ"]["PENSTOCK_API_KEY"] == "secret-key"
    assert "CODEX_HOME" not in found["environ"]


def test_opencode_gets_a_provider(launches: Launches) -> None:
    before = launches.everything()
    assert launches.run("opencode", "--model", "other", "--", "run", "say hello").returncode == 0
    assert launches.everything() == before
    found = launches.found()
    assert found["words"] == ["run", "say hello"]
    content = json.loads(found["environ"]["OPENCODE_CONFIG_CONTENT"])
    assert content["model"] == content["small_model"] == "penstock/other"
    provider = content["provider"]["penstock"]
    assert provider["options"] == {
        "baseURL": f"{launches.environ['PENSTOCK_URL']}/v1", "apiKey": "{env:PENSTOCK_API_KEY}",
    }  # fmt: skip
    assert provider["models"]["other"]["limit"] == {"context": 4096, "output": 1024}
    assert "secret-key" not in found["environ"]["OPENCODE_CONFIG_CONTENT"]


def test_aider_knows_the_context(launches: Launches) -> None:
    before = launches.everything()
    done = launches.run("aider", "--model", "other", "--", "--message", "say hello")
    assert done.returncode == 0
    assert "other has a context of 4,096 tokens; aider needs 16,000" in done.stderr
    assert launches.everything() == before
    found = launches.found()
    environ = found["environ"]
    assert environ["OPENAI_API_BASE"] == launches.environ["PENSTOCK_URL"] + "/v1"
    assert environ["OPENAI_API_KEY"] == "secret-key"
    assert found["words"][:4] == ["--model", "openai/other", "--weak-model", "openai/other"]
    assert found["words"][-2:] == ["--message", "say hello"]
    ((text, _),) = found["files"].values()
    assert json.loads(text)["openai/other"]["max_input_tokens"] == 4096


@pytest.mark.parametrize(("mode", "status"), [("", 0), ("fails", 7), ("killed", 128 + signal.SIGSEGV)])
def test_the_exit_status_is_the_agents(mode: str, status: int, launches: Launches) -> None:
    assert launches.run("codex", FAKE_AGENT=mode).returncode == status


def test_what_a_killed_one_left_is_removed_and_what_a_running_one_has_is_not(launches: Launches) -> None:
    environ = launches.environ | {"FAKE_AGENT": "waits"}
    with subprocess.Popen(launches.command("claude"), env=environ, start_new_session=True) as process:
        launches.wait_for_agent()
        (folder,) = launches.tmp.iterdir()
        os.utime(folder, (0, 0))  # as if it had been made long ago
        launches.run("codex")
        assert (folder / "claude-settings.json").exists()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert folder.exists()
    launches.run("codex")
    assert list(launches.tmp.iterdir()) == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_agent_too_and_leaves_nothing(signum: signal.Signals, launches: Launches) -> None:
    before = launches.everything()
    environ = launches.environ | {"FAKE_AGENT": "waits"}
    with subprocess.Popen(launches.command("claude"), env=environ, start_new_session=True) as process:
        launches.wait_for_agent()
        assert len(list(launches.tmp.iterdir())) == 1
        assert stat.S_IMODE(next(launches.tmp.iterdir()).stat().st_mode) == 0o700
        process.send_signal(signum)
        assert process.wait(30) == 128 + signum
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)  # the agent was in its group
    assert launches.everything() == before


def test_the_terminal_and_its_ctrl_c_are_the_agents(launches: Launches) -> None:
    ours, theirs = pty.openpty()
    environ = launches.environ | {"FAKE_AGENT": "reads"}
    with subprocess.Popen(
        launches.command("codex"), env=environ, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.write(ours, b"hello\n")
        assert process.wait(60) == 0
    found = launches.found()
    assert (found["tty"], found["typed"]) == (True, "hello")
    launches.record.unlink()
    environ["FAKE_AGENT"] = "waits"
    with subprocess.Popen(launches.command("codex"), env=environ, start_new_session=True) as process:
        launches.wait_for_agent()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(30) == 128 + signal.SIGINT  # the agent's own end; nothing was ignored in it
    assert "default_int_handler" in launches.found()["sigint"]
    os.close(ours)
    os.close(theirs)


def test_what_would_be_run_is_printed_without_secrets(launches: Launches) -> None:
    (launches.bin / "claude").unlink()  # it need not be installed
    done = launches.run("claude", "--print", "--", "-p", "it's")
    assert done.returncode == 0
    assert "secret-key" not in done.stdout
    lines = done.stdout.splitlines()
    assert "unset ANTHROPIC_API_KEY" in lines
    assert f"export ANTHROPIC_BASE_URL={launches.environ['PENSTOCK_URL']}" in lines
    assert "export ANTHROPIC_AUTH_TOKEN='(hidden)'" in lines
    assert lines[-1] == """claude --settings penstock-launch/claude-settings.json --model org/coder -p 'it'"'"'s'"""
    assert not launches.record.exists()


@pytest.mark.parametrize(
    ("words", "environ", "says"),
    [
        (["claude"], {"PATH": "/nowhere"}, "Claude Code is not installed (claude is not on PATH): npm install -g @an"),
        (["aider"], {"PATH": "/nowhere"}, "aider is not installed (aider is not on PATH): pip install aider-chat"),
        (["codex", "--model", "none"], {}, "serves org/coder, other; it has no model none"),
        (["codex"], {"PENSTOCK_API_KEY": "wrong"}, "wants a key: add --api-key KEY"),
        (["codex"], {"PENSTOCK_URL": "http://127.0.0.1:9"}, "nothing listens at http://127.0.0.1:9; start it with"),
        (
            ["cursor"],
            {},
            "argument AGENT: invalid choice: 'cursor' (choose from 'claude', 'codex', 'opencode', 'aider'",
        ),
    ],
)
def test_what_is_missing_is_one_line(words: list[str], environ: dict[str, str], says: str, launches: Launches) -> None:
    done = launches.run(*words, **environ)
    assert done.returncode in (1, 2)
    assert says in done.stderr.splitlines()[0]
    assert not launches.record.exists()
