#!/usr/bin/env bash
# Every test: those that only compute share the processors, then those with processes, ports and deadlines of their own
# have them alone. With arguments: pytest with just these.
set -euo pipefail
cd "$(dirname "$0")/.."
pytest=(.venv/bin/python -m pytest)
computing=(tests/kernels tests/weft/engine tests/weft/model tests/weft/capacity tests/grammars tests/training tests/docs)

if [ $# -gt 0 ]; then exec "${pytest[@]}" "$@"; fi
trap 'exit 130' INT # pytest ends with a status of its own, after which the rest would begin
status=0
"${pytest[@]}" --numprocesses logical --maxprocesses 4 "${computing[@]}" || status=$?
"${pytest[@]}" tests "${computing[@]/#/--ignore=}" || status=$?
exit "$status"
