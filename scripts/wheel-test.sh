#!/usr/bin/env bash
# Builds the wheel, installs it into two environments of a temporary folder, without extras and with `cpu`, and runs
# tests/wheel there. The wheel chooses its dependencies; only torch is the version of constraints.txt.
#
#   WEFT_TORCH_INDEX  as for install.sh
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/system.sh
export PIP_DISABLE_PIP_VERSION_CHECK=1

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
.venv/bin/python -m hatchling build -t wheel -d "$folder"
wheel="$(echo "$folder"/weft-*.whl)"
for kind in base cpu; do
    step "installing the wheel: $kind"
    .venv/bin/python -m venv "$folder/$kind"
    pip=("$folder/$kind/bin/python" -m pip install -q)
    if [ "$kind" = base ]; then
        "${pip[@]}" "$wheel"
    else
        "${pip[@]}" --no-deps ${WEFT_TORCH_INDEX:+--index-url "$WEFT_TORCH_INDEX"} "$(grep '^torch==' constraints.txt)"
        "${pip[@]}" "$wheel[$kind]"
    fi
done
.venv/bin/python -m pytest tests/wheel --venvs "$folder" "$@"
