#!/usr/bin/env bash
# tools/smoke_wheel.sh WHEEL
#
# Installs WHEEL into a new virtual environment in a temporary folder and runs the demo from there:
# what a user gets who has no checkout. The folder is removed afterwards.
set -euo pipefail

if [ $# -ne 1 ] || [ ! -f "$1" ]; then
    echo "usage: tools/smoke_wheel.sh WHEEL (one file; got: $*)" >&2
    exit 2
fi
wheel=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
setup=$(cd "$(dirname "$0")" && pwd)/setup_venv.sh
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cd "$folder"
"$setup" "$folder/venv" "$wheel"
env -u PYTHONPATH "$folder/venv/bin/peagle" --help >/dev/null
env -u PYTHONPATH "$folder/venv/bin/peagle" demo --format json >demo.json
"$folder/venv/bin/python" -c 'import json; json.load(open("demo.json"))'
echo "smoke: $(basename "$wheel") installs and runs the demo outside the checkout"
