"""``penstock serve``: declares its flags and hands them, with file and environment, to the launcher."""

from __future__ import annotations

import argparse

from penstock.cli.parsing import COMMANDS
from penstock.cli.worker import NO_SETTINGS, add_config_flags, add_engine_flags
from penstock.config.dump import dump_toml
from penstock.config.load import load_serve

EPILOG = """\
examples:
  penstock serve                                     the bundled storyteller, prefill and decode apart
  penstock serve ~/models/Llama-3.2-1B-Instruct      a Hugging Face folder of the Llama architecture
  penstock serve meta-llama/Llama-3.2-1B-Instruct    the same from the Hub
  penstock serve BAAI/bge-small-en-v1.5              embeddings: one worker, /v1/embeddings (rerankers: /rerank)
  penstock serve MODEL --lora sql=~/adapters/sql     a LoRA adapter, asked for as model "sql"
  penstock serve --catalogue models.toml --model-memory 8GiB     several models, loaded on demand
  penstock serve --prefill 2 --decode 2 --kv-memory 2GiB
  penstock serve --host 0.0.0.0 --api-key "$KEY"     reachable from other machines: needs a key
  penstock serve --api-keys keys.json                keys of several tenants, made by `penstock keys add`

Every flag can also be set as PENSTOCK_FLAG (PENSTOCK_KV_MEMORY=2GiB) or in a TOML file given with --config
(kv_memory = "2GiB", and the tables [limits], [scheduling], [routing], [failover], [hand_over], [supervise]).
Flags win, then the environment.  --print-config writes such a file.
Ready when http://HOST:PORT/ready answers 200.  Ctrl-C or SIGTERM finishes what runs, a second one stops at once.
"""


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
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a folder, a .gguf file or org/name; none: the storyteller"
    )
    add_config_flags(parser)
    _add_http_flags(parser.add_argument_group("HTTP"))
    _add_fleet_flags(parser.add_argument_group("workers"))
    add_engine_flags(parser.add_argument_group("engine"))
    _add_join_flags(parser.add_argument_group("workers on other hosts"))


def _add_http_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", metavar="ADDRESS", help="listen here (default: 127.0.0.1)")
    group.add_argument("--port", metavar="PORT", help="default: 8000; 0: any free one")
    group.add_argument("--gateways", metavar="N", help="processes that answer HTTP, on one port (default: 1)")
    group.add_argument("--event-loop", metavar="auto|uvloop|asyncio", help="theirs (auto: uvloop if it is installed)")
    group.add_argument("--api-key", metavar="KEY", help="clients must send it; PENSTOCK_API_KEY hides it from `ps`")
    group.add_argument("--api-keys", metavar="FILE", help="keys of several tenants, from `penstock keys add`")
    group.add_argument(
        "--allowed-host",
        metavar="NAME",
        action="append",
        help="without a key: also answer requests for this name, as a proxy passes it on (repeat for more; *: all)",
    )
    group.add_argument(
        "--tls-cert", metavar="FILE", help="answer over HTTPS with this certificate (PEM, its chain too)"
    )
    group.add_argument("--tls-key", metavar="FILE", help="its private key (PEM); both are read again when they change")
    group.add_argument(
        "--allowed-origin",
        metavar="ORIGIN",
        action="append",
        help="pages of this origin may use the service from a browser, as https://chat.example.org (repeat for more)",
    )
    group.add_argument("--served-model-name", metavar="NAME", help="the model's name for clients")
    group.add_argument(
        "--generation-config",
        metavar="auto|none",
        help="sampling defaults of the model's generation_config.json (auto), or OpenAI's (default: auto)",
    )
    group.add_argument(
        "--unknown-fields",
        metavar="refuse|ignore",
        help="request fields that this server does not know: answer 400, or pass over them (default: refuse)",
    )
    group.add_argument(
        "--disable-additional-properties",
        action=argparse.BooleanOptionalAction,
        help="objects of a JSON schema have only the properties that it names, unless it says otherwise (default: yes)",
    )
    group.add_argument(
        "--remote-images",
        action="store_true",
        help="fetch images of chats from public addresses (default: they come within the request only)",
    )
    hosts = "fetch them from this host only; .example.com: all below that name (repeat for more; default: any)"
    group.add_argument("--remote-image-host", metavar="HOST", action="append", help=hosts)
    group.add_argument("--catalogue", metavar="FILE", help="several models, loaded on demand (docs/catalogue.md)")
    group.add_argument("--model-memory", metavar="SIZE", help="of all models of the catalogue that are loaded")
    group.add_argument("--lora", metavar="NAME=DIR", action="append", help="a LoRA adapter, as NAME (repeat for more)")
    group.add_argument("--allow-lora-updating", action="store_true", help="clients may load and unload adapters")
    group.add_argument(
        "--response-cache", metavar="SIZE", help="answer equal requests (seed given, or temperature 0) from stored ones"
    )
    group.add_argument("--trace-endpoint", metavar="URL", help="send spans of requests to this OpenTelemetry collector")
    group.add_argument("--trace-file", metavar="FILE", help="write them to this file, as JSON lines")
    group.add_argument("--trace-sample", metavar="RATIO", help="share of requests to trace (default: 1)")
    group.add_argument("--log-requests", action="store_true", help="log a line for each request, without its texts")
    group.add_argument("--log-json", action="store_true", help="log one JSON object a line")


def _add_fleet_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--prefill", metavar="N", help="prefill workers (default: 1)")
    group.add_argument("--decode", metavar="M", help="decode workers (default: 1)")
    group.add_argument(
        "--encode-workers", metavar="N", help="workers that encode images (default: none, prefill workers do it)"
    )
    group.add_argument("--aggregated", action="store_true", help="one worker for both phases instead")
    group.add_argument(
        "--prefill-device",
        metavar="cpu|cuda",
        help="prompts are read there, answers written on processors (docs/gpu.md); needs --allow-mixed-numerics",
    )
    group.add_argument("--prefill-kernels", metavar="FAMILY", help="kernels that prompts are read by; needs the same")
    group.add_argument("--prefill-cores", metavar="CPUS", help="processors of the prefill workers, as 0-3,8")
    group.add_argument("--decode-cores", metavar="CPUS", help="of the decode workers; on shared ones decode goes first")
    group.add_argument(
        "--lend-cores",
        action=argparse.BooleanOptionalAction,
        help="an idle worker's cores work for the others (default: yes)",
    )
    group.add_argument(
        "--transfer", metavar="auto|shm|tcp|curve|nixl", help="how KV pages travel (default: auto, shm on one host)"
    )


def _add_join_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--join", metavar="tcp://HOST:PORT", action="append", help="use this `penstock worker` (repeat for more)"
    )
    group.add_argument(
        "--allow-mixed-numerics",
        action="store_true",
        help="prompts may be read on another kind of processor than answers are written on, and an answer may go on on "
        "another, rather than wait or fail: in other bits",
    )
    group.add_argument(
        "--allow-model-upgrade",
        action="store_true",
        help="use joined workers of another model than that of most when the gateway began, as in a rolling upgrade; "
        "without it they are foreign and given nothing",
    )
    group.add_argument("--keys", metavar="DIR", help="the keys that the workers were started with")


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop.  0 after an orderly end; raises ConfigError, ModelError, GaveUp."""
    flags = {key: value for key, value in vars(args).items() if key not in NO_SETTINGS}
    config = load_serve(flags, config_file=getattr(args, "config", None))
    if getattr(args, "print_config", False):
        print(dump_toml(config, "penstock serve"), end="")
        return 0
    if config.catalogue is not None:
        from penstock.catalog.serve import serve_catalog

        return serve_catalog(config)
    from penstock.launch.compose import serve

    return serve(config)
