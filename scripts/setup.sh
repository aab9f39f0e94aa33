# shellcheck shell=bash
# Shared by quickstart and run-tests: finds Python and a compiler, makes a virtual environment, knows what changed.
# Sourced, never run.  Knows nothing about what is done afterwards.

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

# Prints the Debian packages that are missing, one a line.
missing_packages() {
    local python
    command -v g++ >/dev/null || echo g++
    if ! python=$(find_python); then
        printf '%s\n' python3 python3-venv python3-dev
        return
    fi
    "$python" -c 'import venv, ensurepip' 2>/dev/null || echo python3-venv
    "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || echo python3-dev
}

# Installs what is missing when it may (as root, or through sudo), otherwise says what to type.
need_system_packages() {
    local -a missing as_root=()
    mapfile -t missing < <(missing_packages)
    ((${#missing[@]})) || return 0
    local by_hand="apt-get update && apt-get install ${missing[*]}"
    command -v apt-get >/dev/null ||
        fail "missing: ${missing[*]}" "This is not a Debian system; please install what corresponds to these packages."
    if ((EUID != 0)); then
        if command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [[ -t 0 ]]; }; then
            as_root=(sudo)
        else
            fail "missing system packages: ${missing[*]}" "Please run, as root: $by_hand"
        fi
    fi
    say "Installing system packages: ${missing[*]}"
    "${as_root[@]}" apt-get update -qq || fail "apt-get update failed" "By hand, as root: $by_hand"
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        "${missing[@]}" || fail "apt-get install failed" "By hand, as root: $by_hand"
    find_python >/dev/null || fail "no Python 3.11 or newer" "Set PYTHON to one."
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
