"""``penstock keys``: makes keys, of two kinds.

Between the processes of one deployment: CURVE keys, one folder of them.  For clients: API keys in a file, each of a
tenant; a key is shown once, when it is made.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.cli.paint import table
from penstock.config.api_keys import NAME, KeyFile, Service, TenantEntry, changing, load_keys, new_key
from penstock.config.scheduling import SchedulingConfig
from penstock.errors import ConfigError
from penstock.wire.keys import Keys

EPILOG = """\
examples:
  penstock keys add keys.json --tenant search --weight 2     makes a key of this tenant and shows it, once
  penstock keys add keys.json --tenant nightly --classes batch --tokens-per-minute 100000
  penstock keys list keys.json                               whose keys there are
  penstock keys revoke keys.json k-1a2b3c4d                  this key opens nothing any more
  penstock serve --api-keys keys.json                        reads the file, and again whenever it changes

  penstock keys ~/.config/penstock/keys                      CURVE keys: four files that only you can read
  scp -rp ~/.config/penstock/keys other-host:.config/penstock/

CURVE keys are needed only between hosts: on one host `penstock serve` makes keys of its own at every start.  Whoever
has the files can join the deployment; existing files are never overwritten.  docs/scheduling.md tells of tenants.
"""

VERBS = ("add", "list", "revoke")
_MAX_KEYS = SchedulingConfig().max_tenants
_LIMITS = ("weight", "tokens_per_minute", "requests_per_minute")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "keys",
        help="make and revoke API keys of tenants, or make the keys that workers on several hosts share",
        description="Make and revoke API keys of tenants (add, list, revoke), or make the CURVE keys that the "
        "processes of one deployment share between hosts (DIR).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("what", metavar="add|list|revoke|DIR", help="DIR: a folder for CURVE keys, made if need be")
    parser.add_argument(
        "names", nargs="*", metavar="FILE [ID]", help="the file of API keys; to revoke, also a key's id"
    )
    group = parser.add_argument_group("of a key that is added")
    group.add_argument("--tenant", metavar="NAME", help="whose key it is; needed")
    group.add_argument(
        "--classes",
        metavar="LIST",
        help="interactive, batch or both, what requests are unless they say otherwise first",
    )
    group.add_argument("--operator", action="store_true", help="it may also change workers, and see all requests")
    tenant = parser.add_argument_group("of its tenant, with all of its keys")
    tenant.add_argument("--weight", type=float, metavar="W", help="its share against those of others (default: 1)")
    tenant.add_argument("--tokens-per-minute", type=int, metavar="N", help="of prompts and answers (default: no limit)")
    tenant.add_argument("--requests-per-minute", type=int, metavar="N", help="default: no limit")


def run(args: argparse.Namespace) -> int:
    """0 when it is done; raises ConfigError."""
    if args.what not in VERBS:
        if args.names:
            raise ConfigError(f"penstock keys {args.what}: expected one of {', '.join(VERBS)}, or one folder")
        return _make_folder(Path(args.what))
    wanted = 2 if args.what == "revoke" else 1
    if len(args.names) != wanted:
        raise ConfigError(f"penstock keys {args.what}: expected {'FILE and ID' if wanted == 2 else 'FILE'}")
    path = Path(args.names[0]).expanduser()
    if args.what == "add":
        return _add(path, args)
    return _list(path) if args.what == "list" else _revoke(path, args.names[1])


def _make_folder(folder: Path) -> int:
    for path in Keys.ephemeral().save(folder):
        print(path)
    return 0


def _add(path: Path, args: argparse.Namespace) -> int:
    if not args.tenant:
        raise ConfigError("penstock keys add: whose key is it? Add --tenant NAME")
    if not re.fullmatch(NAME, args.tenant):
        raise ConfigError(
            f"--tenant {args.tenant!r:.80}: a name has letters, digits and . _ @ -, 64 characters at most, and begins "
            "with a letter or a digit"
        )
    given = {name: getattr(args, name) for name in _LIMITS if getattr(args, name) is not None}
    classes = _classes(args.classes)
    try:
        key, entry = new_key(args.tenant, classes, operator=args.operator)
        with changing(path, _MAX_KEYS, make=True) as held:
            file = held[0]
            tenants = {**file.tenants, args.tenant: _changed(file.tenants.get(args.tenant), given)}
            held[0] = msgspec.structs.replace(file, tenants=tenants, keys=(*file.keys, entry))
    except msgspec.ValidationError as error:
        raise ConfigError(f"penstock keys add: {error}") from None
    print(key)
    print(f"{entry.id} of {args.tenant}: shown once, and not kept here or in {path}")
    return 0


def _classes(text: str | None) -> tuple[Service, ...]:
    if text is None:
        return ("interactive", "batch")
    names = tuple(part.strip() for part in text.split(","))
    try:
        return msgspec.convert(tuple(dict.fromkeys(names)), tuple[Service, ...])
    except msgspec.ValidationError:
        raise ConfigError(f"--classes {text}: expected interactive, batch, or both with a comma between") from None


def _changed(entry: TenantEntry | None, given: Mapping[str, Any]) -> TenantEntry:
    known = msgspec.to_builtins(entry) if entry is not None else {}
    return msgspec.convert({**known, **given}, TenantEntry)


def _list(path: Path) -> int:
    file = load_keys(path, _MAX_KEYS)
    rows: list[tuple[str, ...]] = [
        ("KEY", "TENANT", "LABEL", "CLASSES", "WEIGHT", "TOKENS/MIN", "REQUESTS/MIN", "MADE")
    ]
    for key in file.keys:
        entry = file.tenants[key.tenant]
        limits = (entry.tokens_per_minute, entry.requests_per_minute)
        rows.append(
            (
                *(key.id, key.tenant, file.tenant_id(key.tenant), ",".join(key.classes), f"{entry.weight:g}"),
                *("-" if limit is None else str(limit) for limit in limits),
                time.strftime("%Y-%m-%d", time.gmtime(key.created)),
            )
        )
    print(table(rows))
    return 0


def _revoke(path: Path, name: str) -> int:
    with changing(path, _MAX_KEYS) as held:
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
