# shellcheck shell=bash
# Shared by quickstart and run-tests: finds Python and a compiler, makes a virtual environment, knows what changed.
# Sourced from the repository's root, never run.  Knows nothing about what is done afterwards.

# For pytest: a file of tests a core at a time.  A test process that dies ends the run, which would not end otherwise.
# shellcheck disable=SC2034
ON_ALL_CORES=(--numprocesses auto --dist loadfile --max-worker-restart 0)

say() { printf '\n== %s\n' "$*"; }

fail() {
    printf '\nerror: %s\n' "$1" >&2
    shift
    local line
    for line in "$@"; do printf '       %s\n' "$line" >&2; done
    exit 1
}

python_fits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# Prints the Python to use: PYTHON, or the first of the usual names that is 3.11 or newer.
find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3 python3.12 python3.13; do
        if [[ -n $candidate ]] && command -v "$candidate" >/dev/null && python_fits "$candidate"; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

# Prints the Debian packages that are missing, one a line; with FOR_TESTS those of the tests, too.
missing_packages() {
    local python
    command -v g++ >/dev/null || echo g++
    if ! python=$(find_python); then
        printf '%s\n' python3 python3-venv python3-dev
        return
    fi
    "$python" -c 'import venv, ensurepip' 2>/dev/null || echo python3-venv
    if [[ -n ${FOR_TESTS:-} ]]; then
        command -v redis-server >/dev/null || echo redis-server
    fi
    "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || echo python3-dev
}

# Prints the Debian packages of libraries that Mooncake's client loads, as far as they are missing; it is built for x86-64.
missing_libraries() {
    local python
    if [[ $(uname -m) != x86_64 ]] || ! python=$(find_python); then return 0; fi
    "$python" -c 'import ctypes
for package, library in (("libibverbs1", "libibverbs.so.1"), ("libnl-3-200", "libnl-3.so.200"),
                         ("libnl-route-3-200", "libnl-route-3.so.200")):
    try:
        ctypes.CDLL(library)
    except OSError:
        print(package)'
}

# Prints the Debian packages without which some tests are skipped, or the kernels compiled more than once, as far as they
# are missing.
missing_for_some_tests() {
    missing_libraries
    command -v ccache >/dev/null || echo ccache
    # Debian starts nginx on port 80, and NATS on 4222, as soon as they are installed, so that only CI gets them unasked.
    [[ -z ${CI:-} ]] || PATH=$PATH:/usr/sbin command -v nginx >/dev/null || echo nginx-light
    [[ -z ${CI:-} ]] || PATH=$PATH:/usr/sbin command -v nats-server >/dev/null || echo nats-server
    # Of the long tests, the Dockerfile's wants it.
    [[ -z ${CI:-} ]] || command -v mmdebstrap >/dev/null || echo mmdebstrap
}

# Installs what is missing when it may (as root, or through sudo), otherwise says what to type.  With FOR_TESTS
# packages are asked for, too, that may stay missing.
need_system_packages() {
    local -a missing as_root=()
    mapfile -t missing < <(missing_packages)
    if ((${#missing[@]})); then
        local by_hand="apt-get update && apt-get install ${missing[*]}"
        command -v apt-get >/dev/null ||
            fail "missing: ${missing[*]}" "This is not a Debian system; please install what corresponds to these packages."
        become_root || fail "missing system packages: ${missing[*]}" "Please run, as root: $by_hand"
        install_packages "${missing[@]}" || fail "apt-get failed" "By hand, as root: $by_hand"
        find_python >/dev/null || fail "no Python 3.11 or newer" "Set PYTHON to one."
    fi
    [[ -n ${FOR_TESTS:-} ]] || return 0
    mapfile -t missing < <(missing_for_some_tests)
    if ((${#missing[@]})); then
        if ! { command -v apt-get >/dev/null && become_root && install_packages "${missing[@]}"; }; then
            say "not installed: ${missing[*]}: the tests that need them (Mooncake, nginx) are skipped (ccache only saves time)"
        fi
    fi
    if ! PATH=$PATH:/usr/sbin command -v nginx >/dev/null; then
        say "no nginx: its tests are skipped (as root: apt-get install nginx-light)"
    fi
    use_ccache
}

# Has CMake compile through ccache where it is installed: the same source is then compiled once, in whatever folder the
# repository and the build lie.  CMake reads the launcher when a build folder is first configured.
use_ccache() {
    command -v ccache >/dev/null || return 0
    export CMAKE_CXX_COMPILER_LAUNCHER=${CMAKE_CXX_COMPILER_LAUNCHER-ccache}
    export CCACHE_BASEDIR=${CCACHE_BASEDIR-$PWD} CCACHE_NOHASHDIR=${CCACHE_NOHASHDIR-1}
    # By one name: CMake would take c++ and scikit-build-core g++, which are two compilers to ccache.
    export CXX=${CXX-g++}
}

# Sets as_root to what a command of root's begins with; false where neither root nor sudo is there.
become_root() {
    as_root=()
    ((EUID != 0)) || return 0
    command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [[ -t 0 ]]; } || return 1
    as_root=(sudo)
}

# install_packages PACKAGE...: as as_root says.
install_packages() {
    say "Installing system packages: $*"
    "${as_root[@]}" apt-get update -qq &&
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

# make_environment DIR: a virtual environment there, kept when it works.
make_environment() {
    local dir=$1 python
    if [[ -x $dir/bin/python ]] && python_fits "$dir/bin/python" && "$dir/bin/python" -m pip --version >/dev/null 2>&1; then
        return 0
    fi
    python=$(find_python) || fail "no Python 3.11 or newer" "Set PYTHON to one."
    say "Making a virtual environment in $dir ($("$python" --version))"
    rm -rf "$dir"
    "$python" -m venv "$dir" || fail "cannot make a virtual environment in $dir"
}

# stamp_of PATH...: one hash over the contents of these files and folders, build outputs left out.
stamp_of() {
    find "$@" -type f ! -name '*.so' ! -name '*.pyc' ! -path '*/__pycache__/*' -print0 |
        LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1
}

# is_stamped FILE STAMP: was this very state finished before?
is_stamped() { [[ -f $1 && $(<"$1") == "$2" ]]; }

use_ccache
