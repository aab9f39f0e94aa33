"""Settings that are printed are those that are read again."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.config.load import dump_toml, load_serve, load_worker


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"model": 'a "model"\\here', "kv_memory": "2GiB", "lora": ["a=/x", "b=/y"], "trace_sample": "0.25"},
        {"aggregated": True, "lend_cores": False, "max_model_len": "4096", "kv_dtype": "auto"},
    ],
)
def test_what_is_printed_is_read_again(flags: dict[str, Any], tmp_path: Path) -> None:
    config = load_serve(flags, {})
    (tmp_path / "penstock.toml").write_text(dump_toml(config, "penstock serve"))
    assert load_serve({}, {}, tmp_path / "penstock.toml") == config


def test_tables_and_a_workers_settings_come_back(tmp_path: Path) -> None:
    (tmp_path / "given.toml").write_text('keys = "/k"\n[supervise]\nwedge_s = 7.5\n[kv_store]\nalways = true\n')
    config = load_worker({"role": "decode"}, {}, tmp_path / "given.toml")
    (tmp_path / "printed.toml").write_text(dump_toml(config, "penstock worker"))
    assert load_worker({}, {}, tmp_path / "printed.toml") == config


def test_flags_are_in_it_and_keys_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--kv-memory", "2GiB", "--api-key", "sk-secret", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert tomllib.loads(printed)["kv_memory"] == 2 << 30
    assert "sk-secret" not in printed
    assert "# api_key: set it in the environment, as PENSTOCK_API_KEY" in printed
    assert "\n# max_model_len =\n" in printed
