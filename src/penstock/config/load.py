"""Loads the settings of ``penstock serve``, ``worker`` and ``picker``: flags over environment over file over defaults.

The only reader of configuration files and ``PENSTOCK_*`` variables.  Unknown keys are errors, every value is checked,
and each error names where the value came from.  Keeps "auto" for ``resolve``; looks at no model, machine or network.
``dump_toml`` writes settings as such a file.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from penstock.config.base import Config, expanded_path, host_and_port, is_loopback
from penstock.config.fleet_file import FleetFile, FleetNode
from penstock.config.schema import EngineSettings, PickerConfig, ServeConfig, TlsConfig, WorkerServeConfig
from penstock.errors import ConfigError
from penstock.types import Role

ENV_PREFIX = "PENSTOCK_"

DEFAULT_URL = "http://127.0.0.1:8000"

OTHER_VARIABLES = frozenset(
    {
        "PENSTOCK_CLIENTS",
        "PENSTOCK_CONFIG",
        "PENSTOCK_SETUP_ONLY",
        "PENSTOCK_TEST_VENV",
        "PENSTOCK_URL",
        "PENSTOCK_VENV",
    }
)
"""Variables that are not settings of ``serve``: of other commands and of the repository's scripts."""

_Kind = TypeVar("_Kind", bound=Config)

SIZES = (
    "kv_memory",
    "kv_host",
    "kv_disk_size",
    "kv_mooncake_size",
    "image_cache",
    "decoded_weights",
    "lora_memory",
    "model_memory",
    "response_cache",
)
"""Settings in bytes, which may be given as "512MiB"."""

TEXT_LISTS = ("join", "lora", "allowed_host", "allowed_origin", "remote_image_host")
"""Settings with several values, which may be given as text with commas."""

_SIZE_OR_AUTO = ("decoded_weights",)

_TABLES = (
    *("limits", "failover", "hand_over", "kv_store", "supervise", "routing", "scheduling", "trace", "turns"),
    *("membership", "audit", "picker"),
)
"""Tables that only a file can set."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b?|b)?", re.IGNORECASE)
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("i", 1024), ("ib", 1024), ("b", 1000))
}
_HOST = re.compile(r"[A-Za-z0-9._:-]+")
_LISTEN = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s*@?#]+")
# Kubernetes sets these in every pod next to a Service named "penstock"; they are not settings.
_SERVICE_LINK = re.compile(r"PENSTOCK_(SERVICE_.*|PORT_\d+_.*)|PENSTOCK_.*_SERVICE_(HOST|PORT).*")


@dataclass(frozen=True, slots=True)
class _Given:
    """One value with its source, for error messages."""

    value: object
    source: str


def parse_size(text: str) -> int:
    """Bytes of "512MiB", "2GB", "64k" or "1048576".  Raises ConfigError.

    KiB, MiB, GiB, TiB and bare k, m, g, t are powers of 1024; KB, MB, GB, TB are powers of 1000.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"expected a size such as 512MiB or 2GB, got {text!r}")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def load_serve(
    flags: Mapping[str, object],
    environ: Mapping[str, str] | None = None,
    config_file: str | Path | None = None,
) -> ServeConfig:
    """The settings of ``penstock serve`` that follow from ``flags`` (given ones only, by field name), environment and
    file.

    ``environ`` is this process's unless given.  ``PENSTOCK_CONFIG`` names the file when ``config_file`` does not.
    Raises ConfigError in one line.
    """
    config = _load(ServeConfig, flags, environ, config_file)
    _check_serve(config)
    return config


def load_worker(
    flags: Mapping[str, object],
    environ: Mapping[str, str] | None = None,
    config_file: str | Path | None = None,
) -> WorkerServeConfig:
    """The settings of ``penstock worker``; as ``load_serve``."""
    config = _load(WorkerServeConfig, flags, environ, config_file)
    if config.keys is None:
        raise ConfigError("a worker that other hosts join needs --keys DIR (made by `penstock host-keys DIR`)")
    return config


def load_picker(
    flags: Mapping[str, object],
    environ: Mapping[str, str] | None = None,
    config_file: str | Path | None = None,
) -> PickerConfig:
    """The settings of ``penstock picker``; as ``load_serve``."""
    config = _load(PickerConfig, flags, environ, config_file)
    if config.members is None:
        raise ConfigError("--members KIND:WHERE is missing: where the picker learns of gateways, as file:gateways.json")
    listen = _LISTEN.fullmatch(config.listen)
    if listen is None or int(listen["port"]) > 65535:
        raise ConfigError(f"--listen {config.listen}: expected tcp://HOST:PORT")
    host, has_tls = host_and_port(config.listen)[0], config.tls_cert is not None
    if has_tls != (config.tls_key is not None):
        raise ConfigError(f"{'--tls-key' if has_tls else '--tls-cert'} is missing: TLS needs a certificate and its key")
    if not has_tls and not is_loopback(host) and not config.plaintext:
        raise ConfigError(
            f"--listen {config.listen} can be reached from other machines, and proxies send it clients' keys: add "
            "--tls-cert and --tls-key, or --plaintext where a mesh encrypts or the network is the proxy's own"
        )
    return config


NODE_OWNED = (
    *("model", "keys", "join", "members", "gateways", "host", "port"),
    *("prefill", "decode", "encode_workers", "aggregated"),
    *("parallel", "prefill_parallel", "decode_parallel", "tensor_parallel_size", "pipeline_parallel_size"),
    *("catalogue", "model_memory", "prefill_device", "prefill_kernels", "stop_with_parent"),
)
"""Settings that follow from other fields of a fleet file, or that a node cannot have yet."""


def load_node(fleet: FleetFile, node: FleetNode, file: str, environ: Mapping[str, str] | None = None) -> ServeConfig:
    """The settings of one node of a fleet: the node's over the fleet's over the environment.  ``file``: for errors.

    Raises ConfigError in one line.
    """
    given: dict[str, object] = {}
    for where, table in (("settings", fleet.settings), (f"settings of node {node.name}", node.settings)):
        for key, value in table.items():
            field = _known(key.replace("-", "_"), f"{key} in the {where} of {file}", _types(ServeConfig))
            if field in NODE_OWNED:
                raise ConfigError(f"{file}: {key} is no setting of a node; docs/fleet.md says what to write instead")
            given[field] = _parse(field, _types(ServeConfig)[field], _Given(value, f"{key} in the {where} of {file}"))
    meshes = _node_meshes(node, file)
    config = _load(ServeConfig, given | meshes, environ, None)
    config = msgspec.structs.replace(
        config,
        model=fleet.model or config.model,
        keys=fleet.keys or config.keys,
        join=fleet.endpoints(but=node.name),
        members=None,
        host=node.http_host or config.host,
        port=config.port if node.http_port is None else node.http_port,
        gateways=max(1, node.gateways),
    )
    if config.keys is None:
        raise ConfigError(f'{file}: keys is missing: the folder of `penstock host-keys shared DIR`, as keys = "DIR"')
    if node.gateways:
        try:
            _check_front(config)
        except ConfigError as error:
            hint = "in fleet files --api-keys FILE is api_keys among the settings, and --host is http_host"
            raise ConfigError(f"{file}: node {node.name}: {error} ({hint})") from None
    return config


def _node_meshes(node: FleetNode, file: str) -> dict[str, object]:
    """How the workers of each role divide the model.  Raises ConfigError."""
    found: dict[Role, str] = {}
    for group in node.workers:
        if found.setdefault(group.role, group.group) != group.group:
            raise ConfigError(f"{file}: node {node.name}: all workers of role {group.role.value} need the same group")
    fields = {Role.PREFILL: "prefill_parallel", Role.DECODE: "decode_parallel", Role.BOTH: "parallel"}
    return {fields[role]: mesh for role, mesh in found.items() if mesh and role in fields}


def load_client(
    url: str | None, api_key: str | None, environ: Mapping[str, str] | None = None
) -> tuple[str, str | None]:
    """(URL, key) for commands that talk to a running service: flags over PENSTOCK_URL and PENSTOCK_API_KEY.

    The URL may be the base URL of OpenAI clients, which ends in ``/v1``.
    """
    environ = os.environ if environ is None else environ
    base = url or environ.get("PENSTOCK_URL") or DEFAULT_URL
    return re.sub(r"/v1/?$", "", base), api_key or environ.get("PENSTOCK_API_KEY")


def weights_cache_folder(setting: str, environ: Mapping[str, str] | None = None) -> Path | None:
    """The folder that ``weights_cache`` means: "auto" is penstock/weights under XDG_CACHE_HOME or ~/.cache.

    None if it is "off", or "auto" for a user without a home folder.
    """
    if setting == "off":
        return None
    if setting != "auto":
        return expanded_path(setting, "weights_cache")
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_CACHE_HOME") or (environ["HOME"] + "/.cache" if environ.get("HOME") else None)
    return Path(base) / "penstock" / "weights" if base and base.startswith("/") else None


def tls_config(config: ServeConfig) -> TlsConfig | None:
    """The files for HTTPS; None: plain HTTP."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    cert, key = (str(expanded_path(name, "TLS file").absolute()) for name in (config.tls_cert, config.tls_key))
    return TlsConfig(cert=cert, key=key)


def lora_folders(given: Sequence[str]) -> dict[str, Path]:
    """Folders by name of ``--lora NAME=DIR``.  Raises ConfigError."""
    folders: dict[str, Path] = {}
    for text in given:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise ConfigError(f"--lora {text}: expected NAME=DIR, a name for clients and a folder that PEFT wrote")
        if name in folders:
            raise ConfigError(f"--lora {text}: there is an adapter named {name} already")
        folders[name] = expanded_path(folder, f"--lora {name}").absolute()
    return folders


def _load(
    kind: type[_Kind], flags: Mapping[str, object], environ: Mapping[str, str] | None, config_file: str | Path | None
) -> _Kind:
    environ = os.environ if environ is None else environ
    path = config_file or environ.get("PENSTOCK_CONFIG") or None
    types = _types(kind)
    given = _from_file(Path(path), types) if path is not None else {}
    given |= {key: item for key, item in _from_environment(environ).items() if key in types}
    given |= {key: _Given(value, "--" + key.replace("_", "-")) for key, value in flags.items()}
    return kind(**{key: _parse(key, types[key], item) for key, item in given.items()})


def _from_file(path: Path, known: Mapping[str, object]) -> dict[str, _Given]:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return {
        _known(key.replace("-", "_"), f"{key} in {path}", known): _Given(raw[key], f"{key} in {path}") for key in raw
    }


def _from_environment(environ: Mapping[str, str]) -> dict[str, _Given]:
    """The settings of all commands, as they may be started from one environment."""
    given = {}
    for name, value in environ.items():
        if not name.startswith(ENV_PREFIX) or name in OTHER_VARIABLES or _SERVICE_LINK.fullmatch(name):
            continue
        if name == "PENSTOCK_PORT" and value.startswith("tcp://"):
            continue  # another of Kubernetes's
        settings = _types(PickerConfig) | _types(ServeConfig) | _types(WorkerServeConfig)
        key = _known(name.removeprefix(ENV_PREFIX).lower(), name, settings, spelled=_variable)
        if key in _TABLES:
            raise ConfigError(f"{name}: [{key}] can be set in a configuration file only")
        given[key] = _Given(value, name)
    return given


def parse_setting(kind: type[EngineSettings], key: str, value: object, source: str) -> Any:
    """One value of a setting, checked.  Raises ConfigError, which begins with ``source``."""
    return _parse(key, _types(kind)[key], _Given(value, source))


def _variable(key: str) -> str:
    return ENV_PREFIX + key.upper()


def _known(key: str, source: str, names: Mapping[str, object], spelled: Callable[[str], str] = str) -> str:
    """``key``, if it is one of ``names``.  ``spelled``: how a name is written in that source."""
    if key in names:
        return key
    near = difflib.get_close_matches(key, names, n=1)
    raise ConfigError(f"{source}: no such setting" + (f"; did you mean {spelled(near[0])}?" if near else ""))


def _parse(key: str, kind: Any, given: _Given) -> Any:
    value = given.value
    try:
        if key in SIZES and isinstance(value, str) and not (value == "auto" and key in _SIZE_OR_AUTO):
            value = parse_size(value)
        if key in TEXT_LISTS and isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        # Text (from the environment or the command line) may be a number or a boolean; a file has types of its own.
        return msgspec.convert(value, kind, strict=not isinstance(value, str))
    except ConfigError as error:
        raise ConfigError(f"{given.source}: {error}") from None
    except msgspec.ValidationError as error:
        shown = "" if key in ("api_key", "kv_redis", "limits_redis") else f", got {given.value!r:.80}"
        known = f"; expected one of {', '.join(get_args(kind))}" if get_origin(kind) is Literal else ""
        raise ConfigError(f"{given.source}: {_plain(error)}{shown}{known}") from None


def _types(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {item.name: item.type for item in msgspec.structs.fields(kind)}


def _plain(error: msgspec.ValidationError) -> str:
    text = str(error).replace("`", "").replace(" | null", "").partition(", got ")[0]
    return text[:1].lower() + text[1:]


HERE_ONLY = (
    *("prefill", "decode", "encode_workers", "prefill_cores", "decode_cores", "prefill_device", "prefill_kernels"),
    *("parallel", "tensor_parallel_size", "pipeline_parallel_size", "prefill_parallel", "decode_parallel"),
    *("kv_memory", "threads", "max_chunk_tokens"),
)
"""Settings of workers that a gateway without any is not given."""


def _check_catalogue(config: ServeConfig) -> None:
    if config.catalogue is None:
        if config.model_memory is not None:
            raise ConfigError("--model-memory is for --catalogue; one model alone is limited by --kv-memory")
        return
    if config.prefill_device == "cuda":
        raise ConfigError("--catalogue: --prefill-device cuda is for one model, which takes all that is free on a GPU")
    for name in ("model", "served_model_name", "join", "members", "lora"):
        if getattr(config, name):
            flag = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
            raise ConfigError(f"--catalogue: {flag} belongs into the catalogue's file, to one of its models")


def _check_origins(config: ServeConfig) -> None:
    for host in config.allowed_host:
        if host != "*" and not _HOST.fullmatch(host):
            raise ConfigError(
                f"--allowed-host {host}: expected a name or an address as clients write it, without scheme and port, "
                "such as penstock.example.org, or *"
            )
    for origin in config.allowed_origin:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--allowed-origin {origin}: expected an origin as browsers send it, such as https://chat.example.org "
                "(scheme, host and port, no path), or *"
            )
    if "*" in config.allowed_origin and config.api_key is None and config.api_keys is None:
        raise ConfigError(
            "--allowed-origin * lets every web page opened on this network use the service: name the origins, or add "
            "--api-key KEY"
        )


def _check_serve(config: ServeConfig) -> None:
    """Check settings that depend on each other.  Raises ConfigError."""
    _check_workers(config)
    _check_front(config)
    _check_catalogue(config)
    _check_workers_elsewhere(config)


def _check_workers(config: ServeConfig) -> None:
    if config.aggregated and (config.prefill is not None or config.decode is not None):
        raise ConfigError("--aggregated is one worker for both phases: leave out --prefill and --decode")
    if config.aggregated and (config.prefill_cores is not None or config.decode_cores is not None):
        raise ConfigError("--aggregated is one worker on all cores: leave out --prefill-cores and --decode-cores")
    if config.aggregated and (config.prefill_parallel is not None or config.decode_parallel is not None):
        raise ConfigError("--aggregated is one worker for both phases: use --parallel for it")


def _check_front(config: ServeConfig) -> None:
    """Check what concerns gateways."""
    if config.api_key is not None and not config.api_key.strip():
        raise ConfigError("--api-key: an empty key would let all clients in; leave it out or give one")
    if not is_loopback(config.host) and config.api_key is None and config.api_keys is None:
        raise ConfigError(
            f"--host {config.host} can be reached from other machines, so it needs a key: add --api-key KEY "
            "(or set PENSTOCK_API_KEY) or --api-keys FILE, or stay on --host 127.0.0.1"
        )
    lora_folders(config.lora)
    _check_origins(config)
    if (config.tls_cert is None) != (config.tls_key is None):
        missing = "--tls-key" if config.tls_key is None else "--tls-cert"
        raise ConfigError(f"{missing} is missing: HTTPS needs a certificate and its key")
    if config.response_cache is not None and config.allow_mixed_numerics:
        raise ConfigError(
            "--response-cache repeats responses that are bit-identical, which --allow-mixed-numerics does not promise: "
            "leave one of them out"
        )


def _check_workers_elsewhere(config: ServeConfig) -> None:
    """Raises ConfigError."""
    flag = config.elsewhere_flag
    if config.join and config.members is not None:
        raise ConfigError("--join and --members exclude each other: put the workers of --join among the members")
    if config.keys is not None and not config.workers_elsewhere:
        raise ConfigError("--keys is for --join and --members: on one host, keys are made at every start")
    if not config.workers_elsewhere:
        return
    if config.keys is None:
        raise ConfigError(f"{flag} needs --keys DIR: the folder that the workers were started with")
    here = [name for name in HERE_ONLY if getattr(config, name) is not None]
    here += ["aggregated"] if config.aggregated else []
    if here:
        theirs = here[0].replace("_", "-")
        raise ConfigError(f"{flag} starts no workers here: --{theirs} belongs to them (`penstock worker --help`)")


SECRETS = ("api_key",)
"""Never printed."""


def dump_toml(config: Config, command: str) -> str:
    """The file; ``config.load`` reads the same settings from it.  ``command``: whose settings they are."""
    lines = [f"# Settings of `{command}` that are in force; use with --config FILE.  What is commented out is not set."]
    tables = []
    for field in msgspec.structs.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, msgspec.Struct):
            tables.append((field.name, value))
        else:
            lines.append(_line(field.name, value))
    for name, table in tables:
        lines += ["", f"[{name}]"]
        lines += [_line(key, value) for key, value in msgspec.structs.asdict(table).items()]
    return "\n".join(lines) + "\n"


def _line(name: str, value: Any) -> str:
    if name in SECRETS and value is not None:
        return f"# {name}: set it in the environment, as PENSTOCK_{name.upper()}"
    return f"# {name} =" if value is None else f"{name} = {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return msgspec.json.encode(value).decode()  # strings, numbers and booleans of TOML are spelled as JSON's
