#!/usr/bin/env bash
# Prints the path of a Python >= 3.12 that can create virtual environments, or says what is missing and fails.
#
# Order: $PYTHON (then nothing else is tried), every python3* on PATH, the versions that pyenv keeps. Each candidate is run:
# a pyenv shim may exist and still fail, and `python3` may be of any version.
set -euo pipefail

probe='import sys; sys.exit(0 if sys.version_info >= (3, 12) else 3)'
can_make_venv='import ensurepip, venv'
without_venv=""

# Succeeds when $1 runs, is new enough and has venv; remembers in without_venv one that lacks only venv.
usable() {
    "$1" -c "$probe" >/dev/null 2>&1 || return 1
    if ! "$1" -c "$can_make_venv" >/dev/null 2>&1; then
        without_venv="${without_venv:-$1}"
        return 1
    fi
}

missing_venv() {
    {
        echo "error: $1 has no venv or no ensurepip module, so no virtual environment can be created with it."
        echo "       Debian / Ubuntu: apt-get install python3-venv (for that version, e.g. python3.12-venv);"
        echo "       or name another Python >= 3.12:  make PYTHON=/path/to/python3 ..."
    } >&2
    exit 1
}

if [ -n "${PYTHON:-}" ]; then
    if usable "$PYTHON"; then
        command -v "$PYTHON"
        exit 0
    fi
    [ -z "$without_venv" ] || missing_venv "$PYTHON"
    version="$("$PYTHON" --version 2>&1 | head -n 1 || true)"
    echo "error: PYTHON=$PYTHON is not a working Python >= 3.12 (it says: ${version:-nothing})." >&2
    exit 1
fi

for name in python3 python3.12 python3.13 python3.14 python3.15 python; do
    for candidate in $(type -aP "$name" 2>/dev/null || true); do
        if usable "$candidate"; then
            echo "$candidate"
            exit 0
        fi
    done
done

for candidate in "${PYENV_ROOT:-${HOME:-/root}/.pyenv}"/versions/*/bin/python3; do
    if [ -x "$candidate" ] && usable "$candidate"; then
        echo "$candidate"
        exit 0
    fi
done

[ -z "$without_venv" ] || missing_venv "$without_venv"
{
    echo "error: no Python >= 3.12 was found on PATH or in ~/.pyenv/versions."
    echo "       Install one (python.org, your package manager, or: pyenv install 3.12), or name it:"
    echo "       make PYTHON=/path/to/python3.12 ..."
} >&2
exit 1
