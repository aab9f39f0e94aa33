"""``penstock serve``: declares its flags and hands them, with file and environment, to the launcher."""

from __future__ import annotations

import argparse
import os
import signal

from penstock.cli.parsing import COMMANDS
from penstock.cli.settings_flags import ENGINE_FLAGS, Flag, Kind, add_flags, add_model_and_config, settings_of
from penstock.config.load import dump_toml, load_serve
from penstock.errors import ConfigError
from penstock.sidecar import end_with_parent

EPILOG = """\
examples:
  penstock serve                                     the bundled storyteller, prefill and decode apart
  penstock serve ~/models/Llama-3.2-1B-Instruct      a Hugging Face folder of the Llama architecture
  penstock serve meta-llama/Llama-3.2-1B-Instruct    the same from the Hub
  penstock serve BAAI/bge-small-en-v1.5              embeddings: one worker, /v1/embeddings (rerankers: /rerank)
  penstock serve MODEL --lora sql=~/adapters/sql     a LoRA adapter, asked for as model "sql"
  penstock serve --catalogue models.toml --model-memory 8GiB     several models, loaded on demand
  penstock serve --prefill 2 --decode 2 --kv-memory 2GiB
  penstock serve MODEL --members file:members.json --keys DIR    workers of other hosts, as they come and go
  penstock serve --host 0.0.0.0 --api-key "$KEY"     reachable from other machines: needs a key
  penstock serve --api-keys keys.json                keys of several tenants, made by `penstock keys add`
  penstock serve --api-keys keys.json --audit-log audit.jsonl    and who was refused, and what operators did

Every flag can also be set as PENSTOCK_FLAG (PENSTOCK_KV_MEMORY=2GiB) or in a TOML file given with --config
(kv_memory = "2GiB", and the tables [limits], [scheduling], [routing], [failover], [hand_over], [supervise],
[membership]).
Flags win, then the environment.  --print-config writes such a file.
Ready when http://HOST:PORT/ready answers 200.  Ctrl-C or SIGTERM finishes what runs, a second one stops at once.
"""


HTTP_FLAGS = (
    Flag("host", "ADDRESS", "listen here (default: 127.0.0.1)"),
    Flag("port", "PORT", "default: 8000; 0: any free one"),
    Flag("gateways", "N", "gateway processes that share the port (default: 1)"),
    Flag("event-loop", "auto|uvloop|asyncio", "of the gateways (auto: uvloop if it is installed)"),
    Flag("api-key", "KEY", "clients must send it; PENSTOCK_API_KEY hides it from `ps`"),
    Flag("api-keys", "FILE", "keys of several tenants, from `penstock keys add`"),
    Flag("limits-redis", "URL", "count tenants' rates in a Redis, exact over all hosts (docs/scheduling.md)"),
    Flag("audit-log", "FILE", "append refusals, operators' actions and changes of keys, as JSON (docs/security.md)"),
    Flag(
        "allowed-host",
        "NAME",
        "without a key: also answer requests for this name, as a proxy passes it on (repeat for more; *: all)",
        Kind.LIST,
    ),
    Flag("tls-cert", "FILE", "serve HTTPS with this certificate (PEM, with its chain)"),
    Flag("tls-key", "FILE", "its private key (PEM); both are read again when they change"),
    Flag(
        "allowed-origin",
        "ORIGIN",
        "web pages of this origin may use the service, as https://chat.example.org (repeat for more)",
        Kind.LIST,
    ),
    Flag("served-model-name", "NAME", "the model's name for clients"),
    Flag(
        "generation-config",
        "auto|none",
        "sampling defaults of the model's generation_config.json (auto), or OpenAI's (default: auto)",
    ),
    Flag(
        "unknown-fields",
        "refuse|ignore",
        "request fields that this server does not know: answer 400, or ignore them (default: refuse)",
    ),
    Flag(
        "disable-additional-properties",
        "",
        "objects of a JSON schema have only the properties that it names, unless it says otherwise (default: yes)",
        Kind.ON_OFF,
    ),
    Flag(
        "model-alias",
        "PATTERN=NAME",
        "a name that clients may send for model NAME, as 'claude-*=NAME' (repeat for more)",
        Kind.LIST,
    ),
    Flag(
        "strip-billing-header",
        "",
        "leave the line x-anthropic-billing-header out of system prompts; it changes with each request (default: yes)",
        Kind.ON_OFF,
    ),
    Flag(
        "remote-images",
        "",
        "fetch images of chats from public addresses (default: only images in the request)",
        Kind.ON,
    ),
    Flag(
        "remote-image-host",
        "HOST",
        "fetch images from this host only; .example.com: all below that name (repeat for more; default: any)",
        Kind.LIST,
    ),
    Flag("catalogue", "FILE", "several models, loaded on demand (docs/catalogue.md)"),
    Flag("model-memory", "SIZE", "memory of all loaded models of the catalog (default: no limit)"),
    Flag("lora", "NAME=DIR", "a LoRA adapter, as NAME (repeat for more)", Kind.LIST),
    Flag("allow-lora-updating", "", "clients may load and unload adapters", Kind.ON),
    Flag("response-cache", "SIZE", "answer repeated requests (seed given, or temperature 0) from stored responses"),
    Flag("response-store", "DIR", "keep stored responses here, beyond this run (default: until the service ends)"),
    Flag("trace-endpoint", "URL", "send spans of requests to this OpenTelemetry collector"),
    Flag("trace-file", "FILE", "write spans to this file, as JSON lines"),
    Flag("trace-sample", "RATIO", "share of requests to trace when the caller makes no sampling decision (default: 1)"),
    Flag("stop-with-parent", "PID", "stop when this process ends, which started the service (a script's $$)"),
    Flag("log-requests", "", "log a line for each request, without its texts", Kind.ON),
    Flag("log-json", "", "log one JSON object per line", Kind.ON),
)

FLEET_FLAGS = (
    Flag("prefill", "N", "prefill workers (default: 1)"),
    Flag("decode", "M", "decode workers (default: 1)"),
    Flag("encode-workers", "N", "workers that encode images (default: none, prefill workers do it)"),
    Flag("aggregated", "", "one worker for both phases instead", Kind.ON),
    Flag(
        "prefill-device",
        "cpu|cuda",
        "device of the prefill workers; decode runs on CPUs (docs/gpu.md); needs --allow-mixed-numerics",
    ),
    Flag("prefill-kernels", "FAMILY", "kernels of the prefill workers; needs --allow-mixed-numerics"),
    Flag("prefill-parallel", "PLAN", "--parallel of the prefill workers, if it differs"),
    Flag("decode-parallel", "PLAN", "--parallel of the decode workers, if it differs"),
    Flag("prefill-cores", "CPUS", "CPUs of the prefill workers, as 0-3,8"),
    Flag("decode-cores", "CPUS", "CPUs of the decode workers; on shared ones decode has priority"),
    Flag("lend-cores", "", "an idle worker lends its cores to the others (default: yes)", Kind.ON_OFF),
    Flag("transfer", "auto|shm|tcp|curve|nixl", "how KV pages are transferred (default: auto, shm on one host)"),
)

JOIN_FLAGS = (
    Flag("join", "tcp://HOST:PORT", "use this `penstock worker` (repeat for more)", Kind.LIST),
    Flag(
        "members",
        "KIND:WHERE",
        "learn of such workers while serving: file:PATH, fleet:PATH, dns:NAME:PORT, dns:_SERVICE._tcp.NAME (SRV), "
        "nats:URL/BUCKET, or ray:FLEET",
    ),
    Flag(
        "allow-mixed-numerics",
        "",
        "prefill and decode may have different numerics classes, and a request may continue in another one rather than "
        "wait or fail: the OUTPUT DIFFERS",
        Kind.ON,
    ),
    Flag(
        "allow-model-upgrade",
        "",
        "use joined workers of another model than that of most when the gateway started, as in a rolling upgrade; "
        "without it they get no requests",
        Kind.ON,
    ),
    Flag("keys", "DIR", "keys that all hosts share, or this node's (`penstock host-keys`)"),
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "serve",
        help=COMMANDS["serve"],
        description="Serve a model behind the OpenAI API, with prefill and decode on separate workers.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(run=run)
    add_model_and_config(parser)
    add_flags(parser.add_argument_group("HTTP"), HTTP_FLAGS)
    add_flags(parser.add_argument_group("workers"), FLEET_FLAGS)
    add_flags(parser.add_argument_group("engine"), ENGINE_FLAGS)
    add_flags(parser.add_argument_group("workers on other hosts"), JOIN_FLAGS)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped.  0 after an orderly end; raises ConfigError, ModelError, RestartLimitReached."""
    config = load_serve(settings_of(args), config_file=getattr(args, "config", None))
    if getattr(args, "print_config", False):
        print(dump_toml(config, "penstock serve"), end="")
        return 0
    if config.stop_with_parent is not None:
        end_with_parent(signal.SIGTERM)
        if os.getppid() != config.stop_with_parent:
            raise ConfigError(
                f"--stop-with-parent {config.stop_with_parent}: the parent of this process is {os.getppid()}"
            )
    if config.catalogue is not None:
        from penstock.catalog.serve import serve_catalog

        return serve_catalog(config)
    from penstock.launch.compose import serve

    return serve(config)
