#!/usr/bin/env bash
# Every test: those that only compute share the processors, then those with processes, ports and deadlines of their own
# have them alone. With arguments: pytest with just these.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # hundreds of processes start here: what the first one compiles, the others find
pytest=(.venv/bin/python -m pytest)
computing=(tests/kernels tests/weft/{engine,model,capacity} tests/grammars tests/training tests/docs
    tests/weft/worker/test_peak.py tests/weft/weights/test_bundle.py tests/contract/test_gpu_script.py
    tests/services/gateway/test_{templates,long_texts,broken_calls}.py)

if [ $# -gt 0 ]; then exec "${pytest[@]}" "$@"; fi
trap 'exit 130' INT # pytest ends with a status of its own, after which the rest would begin
status=0
"${pytest[@]}" --numprocesses logical --maxprocesses 4 --dist worksteal "${computing[@]}" || status=$?
"${pytest[@]}" tests "${computing[@]/#/--ignore=}" || status=$?
exit "$status"
