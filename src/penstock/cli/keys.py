"""``penstock keys``: API keys of tenants, and what each is for, in a file.  A key is shown once, when it is added.

The keys that processes of several hosts share are another command's: ``penstock host-keys``.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.api.key_permissions import ROUTE_PATHS, utc_text
from penstock.cli.console import text_table
from penstock.cli.parsing import COMMANDS
from penstock.config.api_keys import (
    NAME,
    KeyEntry,
    KeyFile,
    KeyLimits,
    ServiceClassName,
    TenantEntry,
    edit_keys,
    load_keys,
    new_key,
    parse_expiry,
)
from penstock.config.base import expanded_path
from penstock.config.limits import SchedulingConfig
from penstock.errors import ConfigError

EPILOG = """\
examples:
  penstock keys add keys.json --tenant search --weight 2     add a key of this tenant and show it, once
  penstock keys add keys.json --tenant nightly --classes batch --tokens-per-minute 100000
  penstock keys add keys.json --tenant guest --expires 30d --max-concurrency 2
  penstock keys add keys.json --tenant rag --models bge-m3 --routes embeddings,rerank --expires 2027-01-31
  penstock keys list keys.json                               whose keys there are, and what for
  penstock keys revoke keys.json k-1a2b3c4d                  this key opens nothing any more
  penstock serve --api-keys keys.json                        reads the file, and again whenever it changes

Each change replaces the file.  A container that mounts FILE alone keeps the old one until a restart: mount its folder.
docs/scheduling.md explains tenants, classes and weights, docs/security.md expiry, models and routes.
Keys between hosts: penstock host-keys --help
"""

_MAX_KEYS = SchedulingConfig().max_tenants
_LIMITS = ("weight", "tokens_per_minute", "requests_per_minute")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command, its subcommands and their flags."""
    parser = subparsers.add_parser(
        "keys",
        help=COMMANDS["keys"],
        description="Add, list and revoke API keys of tenants.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(title="subcommands", dest="verb", metavar="add|list|revoke", required=True)
    _declare_add(verbs)
    listing = verbs.add_parser("list", help="list all keys", description="List all keys, without their secrets.")
    listing.set_defaults(run=_list)
    listing.add_argument("file", type=Path, metavar="FILE", help="the file of keys")
    revoke = verbs.add_parser("revoke", help="revoke a key", description="Revoke a key.")
    revoke.set_defaults(run=_revoke)
    revoke.add_argument("file", type=Path, metavar="FILE", help="the file of keys")
    revoke.add_argument("key", metavar="ID", help="the key's id, as `penstock keys list` shows it")


def _declare_add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add = verbs.add_parser("add", help="add a key and show it", description="Add a key of a tenant and show it, once.")
    add.set_defaults(run=_add)
    add.add_argument("file", type=Path, metavar="FILE", help="the file of keys, made if need be")
    add.add_argument("--tenant", required=True, metavar="NAME", help="whose key it is")
    add.add_argument(
        "--classes",
        metavar="LIST",
        help="interactive, batch or both; the first is the class of requests that name none (default: both)",
    )
    add.add_argument("--operator", action="store_true", help="it may also change workers, and see all requests")
    key = add.add_argument_group("limits of this key")
    key.add_argument(
        "--expires", metavar="WHEN", help="12h, 30d, 4w, or a date such as 2027-01-31 (00:00 UTC); default: never"
    )
    key.add_argument("--models", metavar="LIST", help="models, aliases and adapters that it is for (default: all)")
    key.add_argument("--routes", metavar="LIST", help=f"some of {', '.join(ROUTE_PATHS)} (default: all)")
    key.add_argument("--max-concurrency", type=int, metavar="N", help="requests open at once (default: no limit)")
    tenant = add.add_argument_group("limits of the tenant, for all of its keys together")
    tenant.add_argument("--weight", type=float, metavar="W", help="its share against those of others (default: 1)")
    tenant.add_argument("--tokens-per-minute", type=int, metavar="N", help="of prompt and output (default: none)")
    tenant.add_argument("--requests-per-minute", type=int, metavar="N", help="default: no limit")


def _add(args: argparse.Namespace) -> int:
    path = expanded_path(args.file, "FILE")
    if not re.fullmatch(NAME, args.tenant):
        raise ConfigError(
            f"--tenant {args.tenant!r:.80}: a name has letters, digits and . _ @ -, 64 characters at most, and begins "
            "with a letter or a digit"
        )
    given = {name: getattr(args, name) for name in _LIMITS if getattr(args, name) is not None}
    classes = _classes(args.classes)
    limits = KeyLimits(
        operator=args.operator,
        expires=None if args.expires is None else parse_expiry(args.expires, time.time()),
        models=_listed("--models", args.models),
        routes=_routes(args.routes),
        max_concurrency=args.max_concurrency,
    )
    try:
        key, entry = new_key(args.tenant, classes, limits)
        with edit_keys(path, _MAX_KEYS, make=True) as held:
            file = held[0]
            tenants = {**file.tenants, args.tenant: _changed(file.tenants.get(args.tenant), given)}
            held[0] = msgspec.structs.replace(file, tenants=tenants, keys=(*file.keys, entry))
    except msgspec.ValidationError as error:
        raise ConfigError(f"penstock keys add: {error}") from None
    print(key)
    print(f"{entry.id} of {args.tenant}{_limits_text(entry)}: shown once, and not kept here or in {path}")
    return 0


def _classes(text: str | None) -> tuple[ServiceClassName, ...]:
    if text is None:
        return ("interactive", "batch")
    names = tuple(part.strip() for part in text.split(","))
    try:
        return msgspec.convert(tuple(dict.fromkeys(names)), tuple[ServiceClassName, ...])
    except msgspec.ValidationError:
        raise ConfigError(f"--classes {text}: expected interactive, batch, or both with a comma between") from None


def _listed(flag: str, text: str | None) -> tuple[str, ...] | None:
    """The parts between commas, each once."""
    if text is None:
        return None
    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if not all(parts):
        raise ConfigError(f"{flag} {text!r:.80}: expected names with commas between; leave it out to allow all")
    return parts


def _routes(text: str | None) -> tuple[str, ...] | None:
    routes = _listed("--routes", text)
    unknown = next((route for route in routes or () if route not in ROUTE_PATHS), None)
    if unknown is not None:
        raise ConfigError(f"--routes: there is no {unknown!r:.80}, but {', '.join(ROUTE_PATHS)}")
    return routes


def _limits_text(entry: KeyEntry) -> str:
    """What a new key is restricted to, as the end of a phrase."""
    limits = [
        *([f"until {utc_text(entry.expires)}"] if entry.expires is not None else []),
        *([f"for {', '.join(entry.models)}"] if entry.models is not None else []),
        *([f"at {', '.join(entry.routes)}"] if entry.routes is not None else []),
        *([f"{entry.max_concurrency} requests at once"] if entry.max_concurrency is not None else []),
    ]
    return "".join(f", {limit}" for limit in limits)


def _changed(entry: TenantEntry | None, given: Mapping[str, Any]) -> TenantEntry:
    known = msgspec.to_builtins(entry) if entry is not None else {}
    return msgspec.convert({**known, **given}, TenantEntry)


def _list(args: argparse.Namespace) -> int:
    file = load_keys(expanded_path(args.file, "FILE"), _MAX_KEYS)
    rows: list[tuple[str, ...]] = [
        (
            *("KEY", "TENANT", "LABEL", "CLASSES", "WEIGHT", "TOKENS/MIN", "REQUESTS/MIN", "MADE"),
            *("EXPIRES", "MODELS", "ROUTES", "AT ONCE", "OPERATOR"),
        )
    ]
    for key in file.keys:
        entry = file.tenants[key.tenant]
        limits = (entry.tokens_per_minute, entry.requests_per_minute)
        rows.append(
            (
                *(key.id, key.tenant, file.tenant_id(key.tenant), ",".join(key.classes), f"{entry.weight:g}"),
                *("-" if limit is None else str(limit) for limit in limits),
                time.strftime("%Y-%m-%d", time.gmtime(key.created)),
                *_restrictions(key),
            )
        )
    print(text_table(rows))
    return 0


def _restrictions(key: KeyEntry) -> tuple[str, ...]:
    """The last columns of the table."""
    expires = "-" if key.expires is None else utc_text(key.expires)
    return (
        f"{expires} (expired)" if key.expires is not None and key.expires <= time.time() else expires,
        ",".join(key.models or ("-",)),
        ",".join(key.routes or ("-",)),
        "-" if key.max_concurrency is None else str(key.max_concurrency),
        "yes" if key.operator else "-",
    )


def _revoke(args: argparse.Namespace) -> int:
    path, name = expanded_path(args.file, "FILE"), args.key
    with edit_keys(path, _MAX_KEYS) as held:
        file = held[0]
        gone = next((key for key in file.keys if key.id == name), None)
        if gone is None:
            known = ", ".join(key.id for key in file.keys[:16]) or "none"
            raise ConfigError(f"{path} has no key {name}; it has {known}")
        held[0] = _without(file, name)
    print(f"{name} of {gone.tenant} is revoked; gateways notice within a second or two")
    return 0


def _without(file: KeyFile, name: str) -> KeyFile:
    """A tenant whose last key has gone is forgotten with it."""
    keys = tuple(key for key in file.keys if key.id != name)
    left = {key.tenant for key in keys}
    tenants = {tenant: entry for tenant, entry in file.tenants.items() if tenant in left}
    return msgspec.structs.replace(file, tenants=tenants, keys=keys)
