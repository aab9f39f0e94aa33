"""Runs a Dockerfile's steps without Docker: each stage in a root file system of its own that ``mmdebstrap`` makes.

Needs root, mount namespaces and Debian's packages.  Knows the instructions of the project's Dockerfile and no other.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

BASE = "debian:12-slim"
SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
TAKEN_ALONG = ("/etc/apt/apt.conf.d", "/etc/pip.conf", "/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs")
"""How this host reaches its package registries."""

CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
OWN_CERTIFICATES = "/certificates-of-the-host.crt"
"""A copy that no package in the stage writes anew."""

STEP_S = 1500


@dataclass
class Stage:
    """One ``FROM`` and what follows."""

    root: Path
    name: str = ""
    env: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"})
    user: str = "0:0"
    folder: str = "/"
    health: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def argv(self, words: list[str], *, readonly: bool = False, **environ: str) -> list[str]:
        """A command line that runs words in this root, as its user, with its environment, in a mount namespace."""
        mounts = ["mount --make-rprivate /", f"mount --rbind {self.root} {self.root}"]
        mounts += [f"mount --rbind /dev {self.root}/dev", f"mount -t proc proc {self.root}/proc"]
        mounts += [f"mkdir -p {self.root}{path} && mount --bind {path} {self.root}{path}" for path in package_folders()]
        if readonly:
            mounts += [f"mount -o remount,bind,ro {self.root}", f"mount -t tmpfs -o mode=1777 tmpfs {self.root}/tmp"]
        inside = f"cd {shlex.quote(self.folder)} && exec {shlex.join(words)}"
        pairs = [f"{name}={value}" for name, value in (self.environment() | environ).items()]
        run = [
            "chroot",
            f"--userspec={self.user}",
            str(self.root),
            "/usr/bin/env",
            "-i",
            *pairs,
            "/bin/sh",
            "-c",
            inside,
        ]
        script = "\n".join([*mounts, f"exec {shlex.join(run)}"])
        return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", script]

    def environment(self) -> dict[str, str]:
        """The stage's own, and what this host's package managers go by."""
        kept = {name: value for name, value in os.environ.items() if re.match(r"PIP_|.*_proxy$", name)}
        trusted = dict.fromkeys(("PIP_CERT", "SSL_CERT_FILE"), OWN_CERTIFICATES) if CERTIFICATES.exists() else {}
        return kept | trusted | self.env


def package_folders() -> list[str]:
    """Local folders that this host's pip installs from."""
    told = subprocess.run(["pip", "config", "list"], capture_output=True, text=True, check=False).stdout
    values = " ".join(line.partition("=")[2] for line in told.splitlines())
    found = (Path(path) for path in re.findall(r"(?<![\w/:.])(?:file://)?(/[\w./-]+)", values))
    return sorted({str(path.parent if path.name == "simple" else path) for path in found if path.is_dir()})


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, argument) of each step; continued lines joined, comments left out."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1].strip()) for line in text.splitlines() if line.strip()]


def build(dockerfile: Path, files: list[str], folder: Path) -> Stage:
    """Run all stages; the last one.  ``files``: of the build context, relative to the Dockerfile.

    Raises subprocess.CalledProcessError with the step's output.
    """
    stages: list[Stage] = []
    for instruction, argument in instructions(dockerfile):
        if instruction == "FROM":
            image, *rest = argument.split()
            assert image == BASE, f"{image}: only {BASE} can be made here"
            root = folder / f"stage-{len(stages)}"
            bare_root(root)
            stages.append(Stage(root, rest[1] if rest else ""))
        else:
            carry_out(instruction, argument, stages, (dockerfile.parent, files))
    return stages[-1]


def bare_root(root: Path) -> None:
    """What ``debian:12-slim`` is: essential packages and apt."""
    run(["mmdebstrap", "--variant=minbase", "--quiet", "bookworm", str(root), str(SOURCES)])
    if CERTIFICATES.exists():
        shutil.copy(CERTIFICATES, f"{root}{OWN_CERTIFICATES}")
    for name in TAKEN_ALONG:
        source, target = Path(name), Path(f"{root}{name}")
        if source.is_dir():
            shutil.copytree(source, target, symlinks=False, dirs_exist_ok=True, ignore_dangling_symlinks=True)
        elif source.exists():
            target.unlink(missing_ok=True)
            shutil.copy(source, target)


def carry_out(instruction: str, argument: str, stages: list[Stage], context: tuple[Path, list[str]]) -> None:
    """One step of the last stage."""
    stage = stages[-1]
    match instruction:
        case "RUN":
            run(stage.argv(["/bin/sh", "-ec", argument]))
        case "COPY" if argument.startswith("--from="):
            name, source, target = argument.removeprefix("--from=").split()
            (other,) = [own for own in stages if own.name == name]
            shutil.copytree(f"{other.root}{source}", f"{stage.root}{target}", symlinks=True)
        case "COPY":
            source, target = argument.split()
            assert source == "."
            for name in context[1]:
                path = Path(f"{stage.root}{target}") / name
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(context[0] / name, path)
        case "ENV":
            stage.env |= dict(pair.split("=", 1) for pair in shlex.split(argument))
        case "USER":
            stage.user = argument
        case "WORKDIR":
            stage.folder = argument
        case "HEALTHCHECK":
            stage.health = json.loads(argument.partition("CMD ")[2])
        case "ENTRYPOINT":
            stage.entrypoint = json.loads(argument)
        case "CMD":
            stage.command = json.loads(argument)
        case "EXPOSE" | "STOPSIGNAL":
            pass
        case _:
            raise AssertionError(f"the instruction {instruction} is not known here")


def run(argv: list[str]) -> None:
    """Run it to its end."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=STEP_S, check=False)
    assert done.returncode == 0, f"{argv[-1][-300:]}\n{(done.stdout + done.stderr)[-4000:]}"
