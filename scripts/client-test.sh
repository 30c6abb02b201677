#!/usr/bin/env bash
# Other people's clients and suites against a gateway and a whole mesh: installs them beside Weft where they are missing, then runs tests/clients;
# with `--install` it only installs them.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/system.sh
unset PYTHONDONTWRITEBYTECODE # as in test.sh

venv=.venv-clients
node=tests/clients/node
has_node() { command -v npm >/dev/null && node -e 'process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)' 2>/dev/null; }

has_node || apt_install nodejs npm && has_node || die "The tests of the TypeScript clients need node 20 or newer, and npm." \
    "Install them and try again: apt install nodejs npm"
sum="$(cat tests/clients/requirements.txt $node/package-lock.json scripts/client-test.sh | cksum)"
if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$sum" ]; then
    step "installing the clients"
    python="$(pick_python)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps -r tests/clients/requirements.txt
    npm ci --prefix "$node" --no-audit --no-fund --loglevel error
    echo "$sum" >"$venv/.installed"
fi
if [ "${1:-}" = --install ]; then exit; fi
exec .venv/bin/python -m pytest tests/clients --clients "$@"
