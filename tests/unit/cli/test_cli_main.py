"""The command line as a whole: help, versions, exit codes, and what is imported for whom."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import __version__
from penstock.cli.main import main
from penstock.cli.parsing import COMMANDS, FOREIGN_FLAGS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "example" in text
    assert f"penstock {command}" in text.split("example", 1)[1]


def test_the_whole_has_help_and_a_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(f"\n    {command}" in text for command in COMMANDS)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"penstock {__version__}\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "penstock: error: the following arguments are required: COMMAND"),
        (["no-such-command"], "penstock: error: there is no command 'no-such-command'"),
        (["serv"], "there is no command 'serv'; did you mean serve?"),
        (["ls"], "there is no command 'ls' here; try: penstock ps"),
        (["launch", "--model", "x"], "the following arguments are required: AGENT"),
        (["run", "a", "--seed", "3", "b", "c"], "penstock run: error: unrecognized arguments: b c"),
        (["run"], "the following arguments are required: MODEL"),
        (["pull", "a/b", "c/d"], "penstock pull: error: unrecognized arguments: c/d"),
        (["serve", "--no-such-flag"], "penstock serve: error: unrecognized arguments: --no-such-flag"),
        (["serve", "a", "b"], "penstock serve: error: unrecognized arguments: b"),
        (["serve", "--maxmodel-len", "8"], "--maxmodel-len: did you mean --max-model-len?"),
        (["serve", "--max_model_len=8"], "--max_model_len: did you mean --max-model-len?"),
        (["serve", "--max-num-seqs", "8"], "--max-num-seqs: use --max-running"),
        (["serve", "--tp-size=2"], "--tp-size: use --parallel tpN"),
        (["serve", "-m", "x.gguf", "-c", "8192"], "-m: MODEL is the first argument: penstock serve FILE.gguf; -c: use"),
        (["serve", "-hf", "org/name"], "-hf: MODEL is the first argument: penstock serve ORG/NAME"),
        (["serve", "--pre", "2"], "ambiguous option: --pre could match --prefill"),
    ],
)
def test_wrong_usage_is_one_line_a_hint_and_exit_2(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    error, usage = capsys.readouterr().err.splitlines()
    assert says in error
    assert usage.startswith("usage: penstock ")
    assert usage.endswith(" --help")


def test_hints_name_flags_that_serve_has(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    flags = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    hinted = {flag for hint in FOREIGN_FLAGS.values() for flag in re.findall(r"--[a-z][a-z-]+", hint)}
    assert hinted <= flags
    assert not flags & set(FOREIGN_FLAGS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_flags(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "host-keys" in script
    assert all(word in script for word in ("launch", "opencode", "pull", "--revision"[2:], "stop-with-parent"))
    assert "max-model-len" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=60)


def test_help_imports_no_command() -> None:
    script = "import sys; from penstock.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    script += "print([m for m in sys.modules if m.startswith('penstock.') and 'cli' not in m and 'errors' not in m])"
    environ = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_an_error_of_ours_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "none"]) == 2
    assert capsys.readouterr().err == "penstock: error: --port: expected int, got 'none'\n"


@pytest.mark.parametrize(
    "words",
    [
        ["node"],
        ["host-keys", "init"],
        ["host-keys", "shared"],
        ["host-keys", "list"],
        ["host-keys", "revoke", "NAME"],
        ["keys", "list"],
        ["probe", "--ready", "tcp://127.0.0.1:1", "--keys"],
        ["plan"],
        ["manifests", "compose"],
    ],
    ids=" ".join,
)
def test_a_home_folder_that_is_not_there_is_one_line_and_exit_2(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    place = "~nosuchuser/x"
    assert main([*words[:2], place, *words[2:]] if words[-1] == "NAME" else [*words, place]) == 2
    said = capsys.readouterr().err
    assert said.endswith(f"{place}: ~nosuchuser has no home folder on this host; write the whole path\n")
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_status_of_nothing_is_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", "http://127.0.0.1:1"]) == 1
    assert "nothing listens at http://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "http://", "http://127.0.0.1:port", "http://127.0.0.1:99999"])
def test_a_url_that_is_none(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", url]) == 2
    assert "penstock: error: --url" in capsys.readouterr().err


def test_a_command_imports_its_own_only() -> None:
    script = "import sys; from penstock.cli.main import main; main(['status', '--url', 'http://127.0.0.1:1']); "
    script += "print([m for m in ('numpy', 'zmq', 'uvicorn', 'tqdm', 'tokenizers', 'torch') if m in sys.modules])"
    environ = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"


def test_output_into_a_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environ = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "--version"],
        env=environ, stdout=writer, stderr=subprocess.PIPE, check=False, timeout=60,
    )  # fmt: skip
    os.close(writer)
    assert b"Traceback" not in done.stderr
