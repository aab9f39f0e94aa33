"""systemd as the first process of a host of its own: namespaces, over an overlay of this machine's root.

No unit of this machine runs there: the folder of its units is empty, and what is reached is the target "basic".  The
network is this machine's.  Needs root, systemd and a cgroup2 that it may write.  Everything ends with ``SystemdHost``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from .processes import alive, children
from .server import PATIENCE_S, START_S, PenstockServer

REPOSITORY = Path(__file__).resolve().parents[2]
SYSTEMD = Path("/lib/systemd/systemd")
NEEDED = ("unshare", "nsenter", "pivot_root", "useradd", "systemctl", "systemd-analyze")
EXECUTABLE = "/opt/penstock/bin/penstock"
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"

BOOT = """
layers=$1 shown=$2 program=$3 system=$4
mount --make-rprivate /
mount -t tmpfs -o mode=755 none "$layers"
mkdir "$layers/upper" "$layers/work" "$layers/root"
root=$layers/root
mount -t overlay overlay -o "lowerdir=/,upperdir=$layers/upper,workdir=$layers/work" "$root"
chroot "$root" useradd --system --create-home penstock
mount -t tmpfs -o mode=755 none "$root/etc/systemd/system"
while read -r path; do
    mkdir -p "$root$path"
    mount --rbind "$path" "$root$path"
    while [ "$path" != / ]; do path=$(dirname "$path"); chmod a+x "$root$path"; done
done < "$shown"
mkdir -p "$root/opt/penstock/bin" "$root/etc/penstock"
cp "$program" "$root/opt/penstock/bin/penstock"
cd "$root"
mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
mount -t tmpfs -o mode=755 tmpfs dev
for node in null zero full random urandom tty; do : > dev/$node; mount --bind /dev/$node dev/$node; done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
mount -t tmpfs -o mode=1777 tmpfs dev/shm
pivot_root . mnt
umount -l mnt
set -- --system --unit=basic.target --show-status=no
exec env -i container=penstock PATH=/usr/sbin:/usr/bin:/sbin:/bin "$system" "$@"
"""


PROBE = """
mount --make-rprivate /
mount -t tmpfs none /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
mount -t proc proc /mnt/root/proc
mount -t cgroup2 cgroup2 /mnt/work
"""
"""What ``BOOT`` needs of the kernel."""

SPACES = ("--cgroup", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child")


def cgroup2() -> Path | None:
    """Where this machine has its unified hierarchy."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.split()[0] == "cgroup2":
            return Path(before.split()[4])
    return None


def missing() -> str:
    """What keeps systemd from being the first process of anything here."""
    lacks = [name for name in NEEDED if shutil.which(name, path=PATH) is None]
    if not SYSTEMD.exists():
        lacks.append(str(SYSTEMD))
    if os.geteuid() != 0 or lacks:
        return f"NOT RUN: units need root, and {', '.join(lacks) or 'what root may do'}"
    place = cgroup2()
    if place is None:
        return "NOT RUN: systemd needs a cgroup2 hierarchy, and none is mounted"
    probe = place / f"penstock-probe-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        return f"NOT RUN: systemd needs cgroups of its own: {probe}: {error.strerror}"
    done = subprocess.run(["unshare", *SPACES, "sh", "-ec", PROBE], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"NOT RUN: systemd needs namespaces and mounts: {done.stderr.strip()}"


class SystemdHost:
    """The host.  Use as a context manager; ``folder`` is for its files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        place = cgroup2()
        assert place is not None
        self._cgroup = place / f"penstock-{os.getpid()}"
        self._pid = 0

    def __enter__(self) -> SystemdHost:
        layers, shown, program, boot = (self._folder / name for name in ("layers", "shown", "penstock", "boot"))
        layers.mkdir()
        shown.write_text("".join(f"{path}\n" for path in dict.fromkeys((REPOSITORY, sys.prefix, sys.base_prefix))))
        source = REPOSITORY / "src"
        program.write_text(f'#!/bin/sh\nexport PYTHONPATH={source}\nexec {sys.executable} -m penstock "$@"\n')
        program.chmod(0o755)
        boot.write_text(BOOT)
        self._cgroup.mkdir()
        join = f'echo $$ > "{self._cgroup}/cgroup.procs"; exec "$@"'
        words = ["unshare", *SPACES, "sh", "-e", boot, layers, shown, program, SYSTEMD]
        with (self._folder / "console").open("wb") as console:
            self._holder = subprocess.Popen(
                ["sh", "-ec", join, "join", *map(str, words)], stdin=subprocess.DEVNULL, stdout=console, stderr=console
            )
        try:
            PenstockServer.wait_for(self._has_booted, START_S, "systemd has booted")
        except BaseException:
            print((self._folder / "console").read_text())
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._holder.kill()  # its child ends with it, and all of the namespace with that
        self._holder.wait(PATIENCE_S)
        if self._pid:
            PenstockServer.wait_for(lambda: not alive(self._pid), PATIENCE_S, "ended")
        for group in sorted((path for path in self._cgroup.rglob("*") if path.is_dir()), reverse=True):
            PenstockServer.wait_for(lambda group=group: not self._procs(group), PATIENCE_S, "empty")
            group.rmdir()
        self._cgroup.rmdir()

    @staticmethod
    def _procs(group: Path) -> str:
        return (group / "cgroup.procs").read_text()

    def _has_booted(self) -> bool:
        assert self._holder.poll() is None, "systemd has ended"
        found = children(self._holder.pid)
        if not found or Path(f"/proc/{found[0]}/comm").read_text() != "systemd\n":
            return False
        self._pid = found[0]
        return self.run("systemctl", "is-active", "--quiet", "basic.target").returncode == 0

    def run(self, *words: str, text: str = "", timeout_s: float = START_S) -> subprocess.CompletedProcess[str]:
        """A command on the host, to its end; ``text``: its standard input."""
        spaces = ("--mount", "--pid", "--uts", "--ipc", "--cgroup", "--root", "--wd=/")
        entered = ["nsenter", "--target", str(self._pid), *spaces, "--", "env", "-i", f"PATH={PATH}", *words]
        return subprocess.run(entered, input=text, capture_output=True, text=True, timeout=timeout_s, check=False)

    def do(self, *words: str, text: str = "") -> str:
        """The same, which must end with 0; what it says."""
        done = self.run(*words, text=text)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}\n{self.journal()}"
        return done.stdout

    def journal(self) -> str:
        """The last lines of the units' logs."""
        return self.run("journalctl", "--no-pager", "-n", "60", "-u", "penstock-*").stdout

    def write(self, path: str, text: str, *, mode: str = "0644", owner: str = "root") -> None:
        """A file of the host."""
        as_said = (f"--mode={mode}", f"--owner={owner}", f"--group={owner}")
        self.do("install", "-D", *as_said, "/dev/stdin", path, text=text)

    def shows(self, unit: str, field: str) -> str:
        """A property of a unit."""
        return self.do("systemctl", "show", "--value", "--property", field, unit).strip()
