#!/usr/bin/env bash
# tools/setup_venv.sh VENV REQUIREMENT...
#
# Creates the virtual environment VENV, unless it is there and works, and installs the pip arguments
# REQUIREMENT... into it (for example `-e .` or a wheel), held to the versions of constraints.txt.
# torch is the CPU build where there is no NVIDIA card and the package index offers one.
#
# PYTHON=/path/to/python picks the interpreter; without it the first of python3, python3.13,
# python3.12 and python3.11 that is Python 3.11 to 3.13 is taken.
set -euo pipefail

if [ $# -lt 2 ]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
root=$(cd "$(dirname "$0")/.." && pwd)
venv=$1
shift
constraints=$root/constraints.txt
torch=$(sed -n 's/^torch==\([^+ ]*\).*$/torch==\1/p' "$constraints")

say() { printf 'setup: %s\n' "$*" >&2; }
die() {
    printf 'setup: error: %s\n' "$*" >&2
    exit 1
}

supported() { # PYTHON: is it an interpreter of a supported version?
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

version_of() { "$1" --version 2>/dev/null || echo "not a Python that runs"; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        supported "$PYTHON" || die "PYTHON=$PYTHON is $(version_of "$PYTHON"); peagle needs" \
            "Python 3.11, 3.12 or 3.13"
        echo "$PYTHON"
        return
    fi
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11; do
        if supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.11, 3.12 or 3.13 on PATH (python3 is $(version_of python3));" \
        "install one, or name it: make PYTHON=/path/to/python3.11 ..."
}

create_venv() {
    local python
    python=$(find_python)
    say "creating $venv with $(version_of "$python")"
    if "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        "$python" -m venv --clear "$venv" && return
    elif "$python" -m venv --clear --without-pip "$venv" 2>/dev/null &&
        "$python" -m pip --python "$venv/bin/python" install --quiet pip; then
        # Some Linux distributions package ensurepip apart from Python; the system's pip will do.
        return
    fi
    die "$python cannot create a virtual environment: install its venv module" \
        "(on Debian and Ubuntu: the package python3-venv) and run make again"
}

pip_install() {
    # --no-compile: modules are compiled when first imported, not all 12,000 of them now.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
        --constraint "$constraints" "$@"
}

cpu_torch_offered() { # Does the package index offer the CPU build? Other troubles end the script.
    local log
    if log=$("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --dry-run \
        --no-deps --ignore-installed "$torch+cpu" 2>&1); then
        return 0
    fi
    case $log in
    *"No matching distribution found"*) return 1 ;;
    *) die "pip failed:"$'\n'"$log" ;;
    esac
}

if ! supported "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    create_venv
fi
say "installing into $venv (the first time takes a minute or more)"
if ! nvidia-smi -L >/dev/null 2>&1; then
    if cpu_torch_offered; then
        torch=$torch+cpu
    elif [ "$(uname -s)" = Linux ]; then
        say "the package index has no CPU build of torch for this Python: taking the default build," \
            "which is large. To avoid that, let PIP_EXTRA_INDEX_URL point to PyTorch's index of CPU" \
            "wheels."
    fi
fi
pip_install "$torch" "$@" || die "pip failed (its messages are above); is the package index reachable?"
say "$venv is ready"
