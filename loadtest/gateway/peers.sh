#!/bin/sh
# usage: loadtest/gateway/peers.sh DIR   makes an environment for each router that `python -m loadtest.gateway --peers DIR` measures.
# nginx comes from the system (apt-get install nginx-light).
set -eu
: "${PYTHON:=python3}"
for peer in sglang-router==0.3.2 vllm-router==0.1.17 'litellm[proxy]==1.106.0'; do
    name=${peer%%==*}
    name=${name%%\[*}
    "$PYTHON" -m venv "$1/$name"
    "$1/$name/bin/pip" install --quiet "$peer"
done
