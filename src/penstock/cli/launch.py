"""``penstock launch``: starts a coding agent that uses a service here, which it starts, too, where none runs.

Sets environment variables, arguments and files in a temporary folder, and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.cli.agents import AGENTS, AgentCommand, AgentService, CodingAgent
from penstock.cli.local_service import exit_on_signals, find_service, started_service, temporary_folder
from penstock.cli.openai_client import request_json
from penstock.cli.parsing import COMMANDS
from penstock.cli.pull import download_with_progress
from penstock.config.load import DEFAULT_URL, load_client
from penstock.errors import ConfigError, PenstockError, WorkerError
from penstock.launch.model_path import is_hub_name
from penstock.launch.run_folder import ServiceRecord
from penstock.sidecar import is_secret

EPILOG = """\
examples:
  penstock launch claude                                  Claude Code, with the service that runs here
  penstock launch codex --model Qwen/Qwen3-Coder-30B-A3B-Instruct     starts that service, and stops it at the end
  penstock launch opencode --url http://10.0.0.7:8000
  penstock launch aider -- --no-auto-commits src/main.py  what follows -- goes to the agent
  penstock launch claude --print                          show what would be set and run

Uses the service at --url (or PENSTOCK_URL), or one of yours on this host, or what answers on port 8000; else it serves
MODEL until the agent ends.  Settings of that service come from the environment, as PENSTOCK_MAX_MODEL_LEN=65536.
The agent's own configuration is not changed; docs/agents.md says what of it applies.
"""

TIMEOUT_S = 5.0
PROBE_S = 1.0
AGENT_STOP_S = 10.0
"""How long an agent may take to end after SIGTERM or SIGHUP before it is killed."""

HIDDEN = "(hidden)"
PRINTED_FOLDER = Path("penstock-launch")
"""Stands in ``--print`` for the temporary folder."""

NOT_STARTED = "http://127.0.0.1:PORT"
"""Stands in ``--print`` for the URL of a service that does not run yet."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags; ``main`` takes off what follows ``--``."""
    parser = subparsers.add_parser(
        "launch",
        help=COMMANDS["launch"],
        description="Start a coding agent that uses a model served here.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, rest=[])
    parser.add_argument("agent", choices=AGENTS, metavar="AGENT", help=", ".join(AGENTS))
    parser.add_argument("--model", metavar="MODEL", help="as `penstock serve` takes it; default: what is served")
    parser.add_argument("--url", metavar="URL", help="of a running service; default: PENSTOCK_URL, or one on this host")
    parser.add_argument("--api-key", metavar="KEY", help="default: PENSTOCK_API_KEY")
    parser.add_argument("--print", action="store_true", help="show environment, files and command, and end")


def run(args: argparse.Namespace) -> int:
    """The agent's exit status; raises ConfigError, ModelError or WorkerError before it starts."""
    agent = AGENTS[args.agent]
    if not args.print and shutil.which(agent.executable) is None:
        raise ConfigError(f"{agent.title} is not installed ({agent.executable} is not on PATH): {agent.install}")
    with exit_on_signals(), temporary_folder() as own_folder:
        folder = PRINTED_FOLDER if args.print else own_folder
        with service_for(args, folder) as service:
            command = agent.command(service, folder, args.rest)
            if args.print:
                print_command(command)
                return 0
            if service.context is not None and service.context < agent.context:
                warn_short_context(agent, service)
            for path, text in command.files.items():
                path.touch(mode=0o600)
                path.write_text(text, encoding="utf-8")
            return run_agent(command)


@contextlib.contextmanager
def service_for(args: argparse.Namespace, folder: Path) -> Iterator[AgentService]:
    """The service to use until the end of the block: a running one, or one that is started for it."""
    url, api_key = load_client(args.url, args.api_key)
    if args.url or os.environ.get("PENSTOCK_URL"):
        yield agent_service(url, api_key, args.model)
        return
    record = find_service(args.model)
    if record is not None:
        yield _of_record(record, api_key)
        return
    service = None
    with contextlib.suppress(PenstockError):  # nothing there, or nothing that fits
        service = agent_service(DEFAULT_URL, api_key, args.model, timeout_s=PROBE_S)
    if service is not None:
        yield service
        return
    if args.model is None:
        raise ConfigError(
            f"no service runs here: name a model to serve, as penstock launch {args.agent} --model ORG/NAME, "
            "or a service elsewhere with --url"
        )
    if args.print:
        print(f"# would start: penstock serve {shlex.quote(args.model)}, and stop it when the agent ends")
        yield AgentService(url=NOT_STARTED, model=args.model, context=None, api_key=api_key)
        return
    if is_hub_name(args.model) and not Path(args.model).exists():
        download_with_progress(args.model)  # before the service starts quietly
    with started_service(args.model, folder) as record:
        yield _of_record(record, api_key)


def _of_record(record: ServiceRecord, api_key: str | None) -> AgentService:
    return agent_service(record.url, api_key if record.needs_key else None, record.model)


def agent_service(url: str, api_key: str | None, model: str | None, timeout_s: float = TIMEOUT_S) -> AgentService:
    """What ``/v1/models`` tells of this model, or of the first.  Raises ConfigError, WorkerError."""
    status, found = request_json(url, api_key, timeout_s, "/v1/models")
    cards: list[dict[str, Any]] = found.get("data", []) if status == 200 and isinstance(found, dict) else []
    names = [card["id"] for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)]
    if not names:
        raise WorkerError(f"{url}: /v1/models answers {status} and names no model")
    if model is not None and model not in names:
        raise ConfigError(f"{url} serves {', '.join(names)}; it has no model {model}")
    card = cards[names.index(model) if model is not None else 0]
    length = card.get("max_model_len")
    return AgentService(
        url=url.rstrip("/"), model=card["id"], context=length if isinstance(length, int) else None, api_key=api_key
    )


def warn_short_context(agent: CodingAgent, service: AgentService) -> None:
    """On standard error."""
    print(
        f"penstock: {service.model} has a context of {service.context:,} tokens; {agent.title} needs {agent.context:,} "
        "for its own prompt and some work.  Serve a model with a longer one, or with more memory for it (--kv-memory).",
        file=sys.stderr,
    )


def print_command(command: AgentCommand) -> None:
    """As it could be pasted into a shell, without secrets."""
    for name in command.unset:
        print(f"unset {name}")
    secrets = {value for name, value in command.environ.items() if is_secret(name) and value not in ("", "none")}

    def shown(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, HIDDEN)
        return text

    for name, value in command.environ.items():
        print(f"export {name}={shlex.quote(shown(value))}")
    if command.files:
        print(f"mkdir -p {PRINTED_FOLDER}")
    for path, text in command.files.items():
        print(f"cat > {shlex.quote(str(path))} <<'END'\n{shown(text)}\nEND")
    print(shlex.join(command.words))


def run_agent(command: AgentCommand) -> int:
    """Run it on this terminal until it ends; its exit status, or 128 + the signal that ended it.

    Ctrl-C and Ctrl-\\ are the agent's.  SIGTERM and SIGHUP are passed on.
    """
    environ = {name: value for name, value in os.environ.items() if name not in command.unset} | dict(command.environ)
    # Handlers, not SIG_IGN: the agent would inherit that.
    before = {signum: signal.signal(signum, lambda *_: None) for signum in (signal.SIGINT, signal.SIGQUIT)}
    try:
        process = subprocess.Popen(list(command.words), env=environ)
        try:
            code = process.wait()
        except SystemExit as end:
            _stop_agent(process, int(end.code or 0) - 128)
            raise
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    return code if code >= 0 else 128 - code


def _stop_agent(process: subprocess.Popen[bytes], signum: int) -> None:
    process.send_signal(signum)
    try:
        process.wait(AGENT_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
