"""``penstock host-keys``: keys by which processes of several hosts know each other.

Two forms: a key for each node, with rights, in an operator's folder (``init``, ``add``, ``rights``, ``rotate``,
``revoke``, ``list``); or one set of keys that all hosts share (``shared``, which is also meant where only a folder is
given).
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from penstock.cli.console import text_table
from penstock.cli.parsing import COMMANDS, HOST_KEYS_VERBS
from penstock.config.base import expanded_path
from penstock.config.node_registry import (
    MAX_NODE_KEYS,
    NODE_NAME,
    REGISTRY_FILE,
    NodeEntry,
    NodeKey,
    NodeRight,
    RegistryFile,
    check_registry,
    edit_registry,
    encode_registry,
    load_registry,
    write_registry,
)
from penstock.config.private_file import locked_folder, replace_file
from penstock.errors import ConfigError
from penstock.wire.curve_keys import CurveKeys, read_secret
from penstock.wire.node_keys import EVENTS_FILE, SECRET_FILE, fingerprint, new_secret

EPILOG = """\
examples:
  penstock host-keys init ~/fleet-keys                        the operator's folder, which stays with the operator
  penstock host-keys add ~/fleet-keys a --rights gateway,worker,operator
  penstock host-keys add ~/fleet-keys b --rights worker       DIR/b is what node b needs, and no other
  scp -rp ~/fleet-keys/b host-b:fleet-keys
  penstock worker MODEL --listen tcp://0.0.0.0:9000 --keys ~/fleet-keys              on host b
  penstock host-keys rotate ~/fleet-keys b                    a second key; then `rotate ... --finish`
  penstock host-keys revoke ~/fleet-keys b                    after that, copy DIR/nodes.json to all other hosts

one set of keys for all hosts instead:
  penstock host-keys shared ~/.config/penstock/keys           four files that only you can read
  scp -rp ~/.config/penstock/keys other-host:.config/penstock/

On one host `penstock serve` makes keys of its own at every start.  Running processes notice another nodes.json or
node.secret within a second or two.  docs/security.md says what each right allows, and the order of a rotation.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its subcommands."""
    parser = subparsers.add_parser(
        "host-keys",
        help=COMMANDS["host-keys"],
        description="Make and manage the keys by which processes of several hosts know each other.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(title="subcommands", dest="verb", metavar="|".join(HOST_KEYS_VERBS), required=True)
    _declare(verbs, "init", "make an operator's folder", _init)
    add = _declare(verbs, "add", "add a node, or renew a revoked one: makes the folder for its host", _add, node=True)
    add.add_argument("--rights", default="gateway,worker", metavar="LIST", help=_RIGHTS_HELP)
    rights = _declare(verbs, "rights", "give a node other rights", _rights, node=True)
    rights.add_argument("rights", metavar="LIST", help=_RIGHTS_HELP)
    rotate = _declare(verbs, "rotate", "give a node a second key, or drop the first", _rotate, node=True)
    rotate.add_argument("--finish", action="store_true", help="accept only the newest key from now on")
    _declare(verbs, "revoke", "accept a node no more", _revoke, node=True)
    _declare(verbs, "list", "list nodes with their rights and keys", _list)
    _declare(verbs, "shared", "make keys that all hosts share", _shared)


_RIGHTS_HELP = f"some of {','.join(NodeRight)} (default: gateway,worker)"


def _declare(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    run: object,
    *,
    node: bool = False,
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.set_defaults(run=run)
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="made if need be" if name in ("init", "shared") else ""
    )
    if node:
        parser.add_argument("node", metavar="NAME", help="letters, digits and -, as in the fleet file")
    return parser


def _init(args: argparse.Namespace) -> int:
    folder = expanded_path(args.folder, "DIR")
    with locked_folder(folder, "the nodes"):
        for name in (REGISTRY_FILE, "server.secret", SECRET_FILE):
            if (folder / name).exists():
                raise ConfigError(f"{folder} has {name} already; choose another folder")
        replace_file(folder / EVENTS_FILE, new_secret()[1] + b"\n")
        write_registry(folder, RegistryFile())
    print(f"{folder}: add nodes with `penstock host-keys add {folder} NAME`; this folder stays with you")
    return 0


def _add(args: argparse.Namespace) -> int:
    folder, name, rights = expanded_path(args.folder, "DIR"), args.node, _parse_rights(args.rights)
    if not re.fullmatch(NODE_NAME, name):
        raise ConfigError(f"{name!r:.80}: a node's name has letters a-z, digits and -, 40 at most, as in a fleet file")
    with _edited(folder) as edit:
        known = next((node for node in edit.file.nodes if node.name == name), None)
        if known is not None and not known.revoked:
            raise ConfigError(f"{folder} has a node {name} already; `rotate` gives it another key, `rights` others")
        public, secret = new_secret()
        entry = NodeEntry(name=name, rights=rights, keys=(_key(public),))
        edit.file = _with(edit.file, entry)
        edit.secrets[name] = secret
    print(f"{folder / name}: copy it to the host of {name}, for --keys, and {folder / REGISTRY_FILE} to all others")
    print(f"{name} may be {', '.join(rights)}; its key is {fingerprint(public)}")
    return 0


def _rights(args: argparse.Namespace) -> int:
    folder, rights = expanded_path(args.folder, "DIR"), _parse_rights(args.rights)
    with _edited(folder) as edit:
        node = _accepted(edit.file, args.node, folder)
        edit.file = _with(edit.file, msgspec.structs.replace(node, rights=rights))
    print(f"{args.node} may be {', '.join(rights)}: copy {folder / args.node} to its host, and {REGISTRY_FILE} to all")
    return 0


def _rotate(args: argparse.Namespace) -> int:
    folder, name = expanded_path(args.folder, "DIR"), args.node
    with _edited(folder) as edit:
        node = _accepted(edit.file, name, folder)
        if args.finish and len(node.keys) < MAX_NODE_KEYS:
            raise ConfigError(f"{name} has one key: `penstock host-keys rotate {folder} {name}` adds the second")
        if not args.finish and len(node.keys) == MAX_NODE_KEYS:
            raise ConfigError(f"{name} has two keys: `rotate {folder} {name} --finish` drops the older first")
        if args.finish:
            keys: tuple[NodeKey, ...] = node.keys[-1:]
        else:
            public, secret = new_secret()
            keys = (*node.keys, _key(public))
            edit.secrets[name] = secret
        edit.file = _with(edit.file, msgspec.structs.replace(node, keys=keys))
    newest = fingerprint(keys[-1].public.encode())
    if args.finish:
        print(f"{name} is known by {newest} only: copy {folder / REGISTRY_FILE} to all hosts")
        return 0
    print(f"{name} is known by two keys, the new one is {newest}:")
    print(f"1. copy {folder / REGISTRY_FILE} to all hosts")
    print(
        f"2. then {folder / name / SECRET_FILE} to the host of {name}, whose processes take it within a second or two"
    )
    print(f"3. then `penstock host-keys rotate {folder} {name} --finish`, and copy {REGISTRY_FILE} to all hosts again")
    return 0


def _revoke(args: argparse.Namespace) -> int:
    folder = expanded_path(args.folder, "DIR")
    with _edited(folder) as edit:
        node = _accepted(edit.file, args.node, folder)
        edit.file = _with(edit.file, msgspec.structs.replace(node, revoked=int(time.time())))
    print(f"{args.node} is revoked: copy {folder / REGISTRY_FILE} to all other hosts, which ignore it from then on")
    return 0


def _list(args: argparse.Namespace) -> int:
    rows: list[tuple[str, ...]] = [("NODE", "RIGHTS", "KEY", "MADE", "AGE", "STATE")]
    now = time.time()
    for node in load_registry(expanded_path(args.folder, "DIR") / REGISTRY_FILE).nodes:
        for key in node.keys:
            state = "accepted"
            if node.revoked:
                state = f"revoked {_date(node.revoked)}"
            elif key is not node.keys[-1]:
                state = "until the rotation is finished"
            days = max(0, int(now - key.created)) // 86_400
            rows.append(
                (
                    *(node.name, ",".join(node.rights), fingerprint(key.public.encode())),
                    *(_date(key.created), f"{days} d", state),
                )
            )
    print(text_table(rows))
    return 0


def _shared(args: argparse.Namespace) -> int:
    for path in CurveKeys.ephemeral().save(expanded_path(args.folder, "DIR")):
        print(path)
    return 0


@dataclass
class _Edit:
    file: RegistryFile
    secrets: dict[str, bytes] = field(default_factory=dict[str, bytes])  # new ones, by node


@contextmanager
def _edited(folder: Path) -> Iterator[_Edit]:
    """The registry of an operator's folder, and then its copies in the folders of nodes that are there."""
    if not (folder / EVENTS_FILE).exists():
        raise ConfigError(f"{folder} is no operator's folder: `penstock host-keys init {folder}` makes one")
    try:
        with _written_secrets(folder) as write_secret, edit_registry(folder) as held:
            edit = _Edit(held[0])
            yield edit
            check_registry(edit.file, str(folder / REGISTRY_FILE))
            # Secrets first: of a key in the registry without one, the rotation could only be finished to lock its node
            # out.
            for name, secret in edit.secrets.items():
                write_secret(name, secret)
            held[0] = edit.file
    finally:  # also after a refusal: what is repeated may have failed at a copy, and what it did is done
        _renew_copies(folder)


def _renew_copies(folder: Path) -> None:
    """In the folders of all nodes, as many as can be.  Raises ConfigError for the first that cannot be."""
    problems: list[str] = []
    with locked_folder(folder, "the nodes"):
        file = load_registry(folder / REGISTRY_FILE)
        raw = encode_registry(file)
        for node in file.nodes:
            try:
                if (folder / node.name).is_dir():
                    _write_copy(folder / node.name / REGISTRY_FILE, raw)
                    _share_events(folder, node)
            except ConfigError as error:
                problems.append(str(error))
    if problems:
        more = f" (and {len(problems) - 1} others)" if len(problems) > 1 else ""
        raise ConfigError(
            f"{problems[0]}{more}: it is not what {folder / REGISTRY_FILE} is now; repeat the command before you copy "
            "folders to hosts"
        )


def _share_events(folder: Path, node: NodeEntry) -> None:
    """Gateways share a secret, other nodes do not need it."""
    path = folder / node.name / EVENTS_FILE
    if node.may(NodeRight.GATEWAY):
        _write_copy(path, read_secret(folder / EVENTS_FILE) + b"\n")
        return
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot remove {path}: {error.strerror}") from error


def _write_copy(path: Path, raw: bytes) -> None:
    """If it is another.  Raises ConfigError."""
    try:
        same = path.read_bytes() == raw
    except OSError:
        same = False
    if not same:
        replace_file(path, raw)


@contextmanager
def _written_secrets(folder: Path) -> Iterator[Callable[[str, bytes], None]]:
    """Writes secrets of nodes.  The earlier ones, which are those of the registry, are back if what follows fails."""
    with ExitStack() as undo:
        earlier: list[Path] = []

        def write(name: str, secret: bytes) -> None:
            path = folder / name / SECRET_FILE
            kept = path.with_name(f".{SECRET_FILE}-before")
            try:
                path.parent.mkdir(mode=0o700, exist_ok=True)
                kept.unlink(missing_ok=True)
                if path.is_file():
                    os.link(path, kept)  # a second name, which takes no space on a full disk
                    earlier.append(kept)
                    undo.callback(_put_back, kept, path)
                elif not path.exists():
                    undo.callback(path.unlink, missing_ok=True)
            except OSError as error:
                raise ConfigError(f"cannot write {path}: {error.strerror}") from error
            replace_file(path, secret + b"\n")

        yield write
        undo.pop_all()
        for kept in earlier:
            kept.unlink()


def _put_back(kept: Path, path: Path) -> None:
    os.replace(kept, path)
    kept.unlink(missing_ok=True)  # rename(2) does nothing to two names of one file


def _accepted(file: RegistryFile, name: str, folder: Path) -> NodeEntry:
    node = next((node for node in file.nodes if node.name == name), None)
    if node is None:
        known = ", ".join(node.name for node in file.nodes) or "none"
        raise ConfigError(f"{folder} has no node {name!r:.80}; it has {known}")
    if node.revoked:
        raise ConfigError(f"{name} is revoked; `penstock host-keys add {folder} {name}` gives it a new key")
    return node


def _with(file: RegistryFile, entry: NodeEntry) -> RegistryFile:
    others = [node for node in file.nodes if node.name != entry.name]
    return msgspec.structs.replace(file, nodes=tuple(sorted((*others, entry), key=lambda node: node.name)))


def _parse_rights(text: str) -> tuple[NodeRight, ...]:
    try:
        return tuple(dict.fromkeys(NodeRight(part.strip()) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"rights {text!r:.80}: expected some of {','.join(NodeRight)}, with commas between") from None


def _key(public: bytes) -> NodeKey:
    return NodeKey(public=public.decode(), created=int(time.time()))


def _date(at: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(at))
