#!/usr/bin/env bash
# Every test, in three lots at once. Those that only compute take what the others leave of the processors; those that mostly
# wait, for peers that are frozen or gone, run beside those with whole meshes, one after another each. What is shown at once
# is the last lot, then come the others. With arguments: pytest with just these, as they are.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # hundreds of processes start here: what the first one compiles, the others find
pytest=(.venv/bin/python -m pytest)
computing=(tests/kernels tests/weft/{engine,model,capacity} tests/grammars tests/training tests/docs
    tests/weft/worker/test_peak.py tests/weft/weights/test_bundle.py tests/contract/test_gpu_script.py
    tests/services/gateway/test_{templates,long_texts,broken_calls}.py)
waiting=(tests/weft/{kv,worker} tests/services/kvstore)

if [ $# -gt 0 ]; then exec "${pytest[@]}" "$@"; fi

lots=() said="$(mktemp -d)"
trap 'for lot in ${lots[@]+"${lots[@]}"}; do kill -- "-$lot" "$lot" 2>/dev/null || true; done; rm -rf "$said"' EXIT
trap 'exit 130' INT # pytest ends with a status of its own, after which the rest would go on

# Runs only while nobody else wants to. In a session of its own that weighs next to nothing: Linux may share time out among
# sessions first, and what a process has then counts within one.
leisurely=(nice -n 19) session=(env)
if chrt --idle 0 true 2>/dev/null; then leisurely=(chrt --idle 0); fi
if command -v setsid >/dev/null; then
    session=(setsid)
    leisurely=(bash -c '{ echo 19 >/proc/self/autogroup; } 2>/dev/null; exec "$@"' leisurely "${leisurely[@]}")
fi
beside() {
    "${session[@]}" "$@" >"$said/${#lots[@]}" 2>&1 &
    lots+=($!)
}

echo "Those that only compute and those that mostly wait run beside these, and are shown after them."
# a test that has to wait for a processor is not stuck
beside "${leisurely[@]}" "${pytest[@]}" --numprocesses logical --maxprocesses 4 --dist worksteal --timeout 300 "${computing[@]}"
beside "${pytest[@]}" "${waiting[@]}" --ignore=tests/weft/worker/test_peak.py
status=0
"${pytest[@]}" tests "${computing[@]/#/--ignore=}" "${waiting[@]/#/--ignore=}" || status=$?
for number in "${!lots[@]}"; do
    wait "${lots[$number]}" || status=$?
    cat "$said/$number"
    unset "lots[$number]" # its number may be another's by now
done
exit "$status"
