"""``penstock picker``: its settings, and what is said of those that cannot be."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.config.load import load_picker

LISTEN = "tcp://0.0.0.0:9002"


@pytest.mark.parametrize(
    ("words", "because"),
    [
        ((), "--members KIND:WHERE is missing"),
        (("--listen", "127.0.0.1:1"), "expected tcp://HOST:PORT"),
        (("--listen", "tcp://127.0.0.1:65536"), "expected tcp://HOST:PORT"),
        (("--listen", "tcp://*:1"), "expected tcp://HOST:PORT"),
        (("--listen", LISTEN), "add --tls-cert and --tls-key, or --plaintext"),
        (("--listen", "tcp://[::]:9002"), "add --tls-cert and --tls-key, or --plaintext"),
        (("--tls-cert", "a"), "--tls-key is missing"),
        (("--tls-key", "a"), "--tls-cert is missing"),
        (("--health-port", "70000"), "--health-port"),
        (("--memberz", "file:a"), "did you mean --members?"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    words: tuple[str, ...], because: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK_MEMBERS", raising=False)
    members = ("--members", "file:a") if words and "--memberz" not in words else ()
    try:
        code = main(["picker", *members, *words])
    except SystemExit as ended:
        code = int(ended.code or 0)
    error = capsys.readouterr().err
    assert code == 2
    assert because in error
    assert "Traceback" not in error


def test_printed_settings_are_read_as_they_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--members", "dns:gateways:8000", "--listen", LISTEN, "--plaintext", "--metrics-port", "0"]
    assert main(["picker", *words, "--print-config"]) == 0
    text = capsys.readouterr().out
    file = tmp_path / "picker.toml"
    file.write_text(text.replace("max_endpoints = 3", "max_endpoints = 2"))
    config = load_picker({}, {}, file)
    assert (config.members, config.listen, config.plaintext) == ("dns:gateways:8000", LISTEN, True)
    assert (config.metrics_port, config.health_port, config.picker.max_endpoints) == (0, 9003, 2)
    assert set(tomllib.loads(text)) >= {"picker", "membership"}


def test_the_environment_counts_below_flags() -> None:
    environ = {"PENSTOCK_MEMBERS": "file:a", "PENSTOCK_HEALTH_PORT": "1", "PENSTOCK_MODEL": "of a worker"}
    config = load_picker({"health_port": "2"}, environ)
    assert (config.members, config.health_port) == ("file:a", 2)
