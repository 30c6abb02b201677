#!/usr/bin/env bash
# Every test, in two lots at once. Those with processes, ports and deadlines of their own run one after another, as if they
# were alone; those that only compute take what these leave of the processors, and are shown after them.
# `--computing` and `--alone` run one of the lots. With other arguments: pytest with just these, as they are.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # hundreds of processes start here: what the first one compiles, the others find
pytest=(.venv/bin/python -m pytest)
computing=(tests/kernels tests/weft/{engine,model,capacity,drafting,gguf_import,groups} tests/grammars tests/training tests/docs
    tests/weft/test_{tekken,tokenizer}.py tests/weft/kv/test_{block_pool,compound_entries,layer_groups}.py
    tests/weft/worker/test_memory_profile.py tests/bundle/test_{bundle,bundle_damage,bundle_draft,bundle_packing,rans}.py
    tests/contract/test_gpu_script.py tests/loadtest/test_{enlarge,fleet,speculation_bench,speculation_peers}.py
    tests/services/gateway/test_{templates,long_texts,jinja,special_tokens,tool_parsers,validator}.py)

# Runs only while nobody else wants to. In a session of its own that weighs next to nothing: Linux may share time out among
# sessions first, and what a process has then counts within one.
leisurely=(nice -n 19)
if chrt --idle 0 true 2>/dev/null; then leisurely=(chrt --idle 0); fi
if command -v setsid >/dev/null; then
    leisurely=(setsid bash -c '{ echo 19 >/proc/self/autogroup; } 2>/dev/null; exec "$@"' leisurely "${leisurely[@]}")
fi

case "${1:-}" in
# Only a hang may fail by time: a test that waits for a processor beside other busy processes took over 300 s.
--computing) exec "${leisurely[@]}" "${pytest[@]}" --numprocesses logical --maxprocesses 4 --dist worksteal --timeout 1500 "${computing[@]}" ;;
--alone) exec "${pytest[@]}" tests "${computing[@]/#/--ignore=}" ;;
?*) exec "${pytest[@]}" "$@" ;;
esac

beside='' said="$(mktemp)"
trap '[ -z "$beside" ] || kill -- "-$beside" "$beside" 2>/dev/null || true; rm -f "$said"' EXIT
trap 'exit 130' INT # pytest ends with a status of its own, after which the rest would go on
echo "Those that only compute run beside these, and are shown after them."
scripts/test.sh --computing >"$said" 2>&1 &
beside=$!
status=0
scripts/test.sh --alone || status=$?
wait "$beside" || status=$?
beside='' # its number may be another's by now
cat "$said"
exit "$status"
