#!/usr/bin/env bash
# Makes .venv and installs Weft into it: `install.sh` to run a mesh, `install.sh dev` to test it too.
# Does nothing when pyproject.toml and constraints.txt have not changed since the last time, nor the folder's place: what
# lies in .venv knows where it is.
#
#   PYTHON            the interpreter to use; default: the first of python3, python3.13, ... that is 3.11 or newer
#   WEFT_TORCH_INDEX  a package index to find torch in, e.g. PyTorch's index of CPU wheels; default: pip's own configuration
#   WEFT_MOONCAKE     cpu, cuda12 or cuda13; default: by the machine
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/system.sh

kind="${1:-run}"
venv=.venv
sum="$(cat pyproject.toml constraints.txt scripts/install.sh | cksum) $PWD"
# While pip is at work: by which process. Somebody who stops it half-way leaves packages that make the next one fail with an
# error about something else.
at_work="$venv/.at-work"
if [ -e "$at_work" ] && kill -0 "$(cat "$at_work")" 2>/dev/null; then
    die "another installation into $PWD/$venv is under way (process $(cat "$at_work"))." "Try again when it has ended; if that process is something else: make clean"
fi
# what `dev` installs is more than `run` needs
for level in "$kind" dev; do
    if [ -e "$at_work" ]; then break; fi
    if [ "$(cat "$venv/.installed-$level" 2>/dev/null)" = "$sum" ] && [ -x "$venv/bin/weft" ]; then exit 0; fi
done

make_venv() {
    local python="$1" version
    step "making $venv with $("$python" --version)"
    rm -rf "$venv"
    if "$python" -c 'import ensurepip' >/dev/null 2>&1; then
        "$python" -m venv "$venv"
        return
    fi
    version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    apt_install "python$version-venv" || die "This Python cannot make virtual environments: it lacks ensurepip." \
        "Install it and try again: apt install python$version-venv"
    "$python" -m venv "$venv"
}

mooncake_flavour() {
    local cuda
    if [ -n "${WEFT_MOONCAKE:-}" ]; then echo "$WEFT_MOONCAKE"; return; fi
    cuda="$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p' | head -n 1)" || true
    if [ -z "$cuda" ]; then echo cpu; elif [ "$cuda" -ge 13 ]; then echo cuda13; else echo cuda12; fi
}

# torch comes first and alone, so that an index that is given for it serves nothing else
install_torch() {
    local version
    version="$(sed -n 's/^torch==//p' constraints.txt)"
    step "installing torch $version"
    if [ "$(mooncake_flavour)" = cpu ] && [ -z "${WEFT_TORCH_INDEX:-}" ]; then
        note "no GPU here: should pip fetch a build with CUDA (gigabytes), stop it and say" \
            "make WEFT_TORCH_INDEX=<address of PyTorch's index of CPU wheels> serve"
    fi
    "$venv/bin/python" -m pip install --no-compile --no-deps ${WEFT_TORCH_INDEX:+--index-url "$WEFT_TORCH_INDEX"} "torch==$version"
}

install_weft() {
    local extras="$(mooncake_flavour)"
    if [ "$kind" = dev ]; then extras="$extras,dev"; fi
    if [ "$kind" = dev ] && ! brings_triton "$venv/bin/python"; then extras="$extras,interpreter"; fi
    step "installing Weft and what it needs ($extras)"
    "$venv/bin/python" -m pip install --no-compile -c constraints.txt hatchling editables &&
        "$venv/bin/python" -m pip install --no-compile -c constraints.txt --no-build-isolation -e ".[$extras]"
}

# By all processors, where pip takes one; not what hardly anybody imports, which Python compiles when somebody does. Some
# packages have files that are not for this Python.
rarely='/tests?/|/transformers/models/|/torch/(testing|_inductor|_dynamo|onnx)/'
rarely="$rarely|/site-packages/(sympy|networkx|moto|pip|setuptools|fontTools|pygments|mypyc?)/"
compile_all() {
    step "compiling what was installed"
    "$venv/bin/python" -m compileall -qq -j 0 -x "$rarely" "$venv/lib" || true
}

trap 'exit 130' INT # pip ends with a status as if it had failed
unless_stopped() {
    local status=0
    echo $$ >"$at_work"
    "$@" || status=$?
    if [ "$status" -lt 128 ]; then rm -f "$at_work"; fi # more: ended by a signal
    return "$status"
}

# a virtual environment that was moved or copied is another folder's
if [ -e "$at_work" ]; then note "an earlier installation was stopped half-way: beginning anew; what was downloaded is kept"; fi
if [ -e "$at_work" ] || [ ! -x "$venv/bin/python" ] || ! grep -qsF -e "$PWD/$venv" "$venv/bin/pip" || ! "$venv/bin/python" -c 'import pip' >/dev/null 2>&1; then
    python="$(pick_python)"
    make_venv "$python"
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1
unless_stopped install_torch || die "torch could not be installed; pip says why above." \
    "Without a GPU, PyTorch's index of CPU wheels is the place to get it: make WEFT_TORCH_INDEX=<its address> serve"
unless_stopped install_weft || die "pip could not install what Weft needs; it says why above." "Try again; what was downloaded is kept."
compile_all
check_mooncake "$venv/bin/python"
step "building the CPU kernels"
# tests run all that the processor can
sets="$(if [ "$kind" = dev ]; then echo here; else echo best; fi)"
"$venv/bin/python" -m weft_kernels.native "$sets" && "$venv/bin/python" -m weft_bundle.rans "$sets" || note "they need a C++ compiler (Debian, Ubuntu: apt install g++); Weft runs without, slower"
echo "$sum" >"$venv/.installed-$kind"
step "installed"
