"""Flags over environment over file; unknown keys, bad values and dangerous combinations are refused in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import fields

from penstock.config.base import is_loopback
from penstock.config.load import load_client, load_serve, load_worker, parse_size
from penstock.config.schema import ServeConfig
from penstock.errors import ConfigError
from penstock.types import Role

ROOT = Path(__file__).parents[3]


def refused(because: str, *, flags: dict[str, object] | None = None, env: dict[str, str] | None = None) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_serve(flags or {}, env or {})
    assert because in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "penstock.toml"
    path.write_text(
        'port = 1000\nhost = "::1"\nmax-model-len = 64\nkv_memory = "1MiB"\n\n[supervise]\nwedge_s = 0.5\n',
        encoding="utf-8",
    )
    return path


def test_nothing_given_is_the_default() -> None:
    assert load_serve({}, {"HOME": "/root"}) == ServeConfig()


def test_flags_beat_environment_beats_file(file: Path) -> None:
    config = load_serve({"port": 3000}, {"PENSTOCK_PORT": "2000", "PENSTOCK_HOST": "localhost"}, file)
    assert (config.port, config.host, config.max_model_len, config.kv_memory) == (3000, "localhost", 64, 1 << 20)
    assert config.supervise.wedge_s == 0.5
    assert config.supervise.drain_s == ServeConfig().supervise.drain_s


def test_the_environment_can_name_the_file(file: Path) -> None:
    assert load_serve({}, {"PENSTOCK_CONFIG": str(file)}).port == 1000


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("1", True), ("false", False), ("0", False)],
)
def test_booleans_from_the_environment(text: str, value: bool) -> None:
    assert load_serve({}, {"PENSTOCK_AGGREGATED": text}).aggregated is value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1048576", 1 << 20),
        ("512MiB", 512 << 20),
        ("512M", 512 << 20),
        ("2GB", 2_000_000_000),
        ("1.5 GiB", 3 << 29),
        ("64k", 64 << 10),
        ("1t", 1 << 40),
        ("10b", 10),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value
    assert load_serve({"kv_memory": text}, {}).kv_memory == value


@pytest.mark.parametrize("text", ["", "MiB", "-1MiB", "1 XB", "1e9", "0x10", "1MiB2"])
def test_no_sizes(text: str) -> None:
    refused("--kv-memory: expected a size such as 512MiB", flags={"kv_memory": text})


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("0", 0), ("2GiB", 2 << 30)])
def test_decoded_weights_are_a_size_or_auto(text: str, value: int | str) -> None:
    assert load_serve({"decoded_weights": text}, {}).decoded_weights == value
    assert load_serve({}, {}).decoded_weights == "auto"
    refused("--decoded-weights: expected a size such as 512MiB", flags={"decoded_weights": "all"})
    refused("--kv-memory: expected a size such as 512MiB", flags={"kv_memory": "auto"})


def test_bad_values_name_their_source() -> None:
    refused("PENSTOCK_PORT: expected int, got 'high'", env={"PENSTOCK_PORT": "high"})
    refused("--port: expected int <= 65535", flags={"port": "65536"})
    refused("--prefill: expected int >= 1", flags={"prefill": "0"})
    refused("--kv-memory: expected int >= 1", flags={"kv_memory": "0"})
    refused("--transfer: invalid enum value 'rdma'", flags={"transfer": "rdma"})
    refused(
        "--kv-dtype: invalid enum value 'fp8', got 'fp8'; expected one of auto, fp8_e4m3", flags={"kv_dtype": "fp8"}
    )
    refused("PENSTOCK_AGGREGATED: expected bool", env={"PENSTOCK_AGGREGATED": "perhaps"})


def test_a_key_is_never_shown() -> None:
    with pytest.raises(ConfigError) as refusal:
        load_serve({"api_key": 12345}, {})
    assert "12345" not in str(refusal.value)


def test_unknown_keys_are_errors() -> None:
    refused("PENSTOCK_PROT: no such setting; did you mean PENSTOCK_PORT?", env={"PENSTOCK_PROT": "1"})
    refused("PENSTOCK_LIMITS: [limits] can be set in a configuration file only", env={"PENSTOCK_LIMITS": "1"})


@pytest.mark.parametrize(
    ("text", "because"),
    [
        ("prot = 1", "prot in"),
        ("[limits]\nmax_nn = 3", "unknown field max_nn"),
        ("[limits]\nmax_n = '3'", "expected int"),
        ("port = '8000'\nport = 3", "is not valid TOML"),
        ("port = true", "expected int"),
        ("port = 80.5", "expected int"),
        ("\udcff", "is not valid TOML"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, because: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError) as refusal:
        load_serve({}, {}, path)
    assert because in str(refusal.value)
    assert str(path) in str(refusal.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        load_serve({}, {}, tmp_path / "none.toml")


def test_service_links_of_kubernetes_are_not_settings() -> None:
    links = {
        "PENSTOCK_PORT": "tcp://10.0.0.7:8000",
        "PENSTOCK_SERVICE_HOST": "10.0.0.7",
        "PENSTOCK_SERVICE_PORT_HTTP": "8000",
        "PENSTOCK_PORT_8000_TCP_ADDR": "10.0.0.7",
    }
    assert load_serve({}, links) == ServeConfig()


def test_variables_of_the_repositorys_scripts_are_known() -> None:
    scripts = [ROOT / "quickstart", ROOT / "run-tests", ROOT / "dev", ROOT / ".ci/run", *(ROOT / "scripts").iterdir()]
    texts = [path.read_text(encoding="utf-8") for path in scripts if path.is_file()]
    names = {name for text in texts for name in re.findall(r"\$\{?(PENSTOCK_[A-Z_]+)", text)}
    assert {"PENSTOCK_CLIENTS", "PENSTOCK_VENV"} <= names
    settings = {field.name for field in fields(ServeConfig)}
    others = [name for name in names if name.removeprefix("PENSTOCK_").lower() not in settings]
    assert load_serve({}, dict.fromkeys(others, "/some/folder")) == ServeConfig()


def test_off_the_loopback_a_key_is_a_must() -> None:
    refused("--host 0.0.0.0 can be reached from other machines", flags={"host": "0.0.0.0"})
    assert load_serve({"host": "0.0.0.0", "api_key": "k"}, {}).api_key == "k"
    assert load_serve({"host": "0.0.0.0"}, {"PENSTOCK_API_KEY": "k"}).api_key == "k"
    refused("an empty key", flags={"host": "0.0.0.0", "api_key": " "})


def test_aggregated_excludes_counts() -> None:
    refused("leave out --prefill", flags={"aggregated": True, "prefill": 2})
    refused("leave out --prefill", flags={"aggregated": True}, env={"PENSTOCK_DECODE": "1"})


def test_stored_responses_and_traces(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text("[trace]\nmax_queued_spans = 7\n", encoding="utf-8")
    config = load_serve({"response_cache": "2MiB", "trace_sample": "0.25"}, {"PENSTOCK_TRACE_FILE": "spans"}, path)
    assert (config.response_cache, config.trace_sample, config.trace_file) == (2 << 20, 0.25, "spans")
    assert config.trace.max_queued_spans == 7
    refused("--trace-sample", flags={"trace_sample": "1.5"})
    refused("leave one of them out", flags={"response_cache": "1MiB", "allow_mixed_numerics": True})


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True)]
    + [
        (host, False)
        for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "", "localhost.evil.example", "127.evil.example")
    ],
)
def test_loopback(host: str, local: bool) -> None:
    assert is_loopback(host) is local


# --- several hosts ---------------------------------------------------------------------------------------------------


def test_a_worker_has_settings_of_its_own(tmp_path: Path) -> None:
    flags = {"role": "prefill", "listen": "tcp://10.0.0.1:9000", "keys": "/k", "kv_memory": "1GiB", "name": "p-1"}
    config = load_worker(flags, {"PENSTOCK_THREADS": "3", "PENSTOCK_PORT": "80"})
    assert (config.role, config.threads, config.kv_memory, config.name) == (Role.PREFILL, 3, 1 << 30, "p-1")
    path = tmp_path / "worker.toml"
    path.write_text("port = 80", encoding="utf-8")
    with pytest.raises(ConfigError, match="no such setting"):
        load_worker(flags, {}, path)
    for name in ("", "a b", "x" * 65, "Ä", "-x"):
        with pytest.raises(ConfigError, match="--name"):
            load_worker(flags | {"name": name}, {})
    with pytest.raises(ConfigError, match="needs --keys DIR"):
        load_worker({"role": "both"}, {})


def test_joining_starts_nothing_here() -> None:
    ends = ("tcp://a:1", "tcp://b:2")
    assert load_serve({"join": list(ends), "keys": "/k"}, {}).join == ends
    assert load_serve({}, {"PENSTOCK_JOIN": "tcp://a:1, tcp://b:2", "PENSTOCK_KEYS": "/k"}).join == ends
    refused("--join needs --keys", flags={"join": ["tcp://a:1"]})
    refused("--keys is for --join", flags={"keys": "/k"})
    for flag in ("prefill", "decode", "kv_memory", "threads", "max_chunk_tokens"):
        refused(f"--{flag.replace('_', '-')} belongs to them", flags={"join": ["tcp://a:1"], "keys": "/k", flag: 64})
    refused("--aggregated belongs to them", flags={"join": ["tcp://a:1"], "keys": "/k", "aggregated": True})


def test_origins_of_web_pages() -> None:
    page = "https://chat.example.org:8443"
    assert load_serve({"allowed_origin": [page, "app://obsidian.md"]}, {}).allowed_origin == (page, "app://obsidian.md")
    assert (
        load_serve({}, {"PENSTOCK_ALLOWED_ORIGIN": f"{page}, http://localhost:3000"}).allowed_origin[1][-4:] == "3000"
    )
    assert load_serve({"allowed_origin": "*", "api_key": "k"}, {}).allowed_origin == ("*",)
    for origin in ("chat.example.org", f"{page}/", "https://*.example.org", "null"):
        refused("expected an origin as browsers send it", flags={"allowed_origin": [origin]})
    refused("lets every web page", flags={"allowed_origin": ["*"]})


@pytest.mark.parametrize("end", ["", "/v1", "/v1/"])
def test_the_base_url_of_openai_clients_is_taken(end: str) -> None:
    at = "http://127.0.0.1:8000"
    assert load_client(f"{at}{end}", None, {}) == (at, None)
    assert load_client(None, None, {"PENSTOCK_URL": f"{at}/prefix{end}"}) == (f"{at}/prefix", None)


def test_ranks_are_of_workers_here_and_of_their_roles() -> None:
    refused("use --parallel for it", flags={"aggregated": True, "decode_parallel": "tp2"})
    refused(
        "--join starts no workers here: --parallel belongs to them",
        flags={"join": ("tcp://127.0.0.1:1",), "keys": "k", "parallel": "tp2"},
    )
