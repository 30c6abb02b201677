#!/usr/bin/env bash
# Agents of other people against the gateway: npm installs them into .weft/agents (1 GB), then tests/agents runs them.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/system.sh

command -v npm >/dev/null || die "The agents need Node.js and npm." "Install them and try again: apt install nodejs npm"
mkdir -p .weft/agents
if ! cmp -s tests/agents/package.json .weft/agents/installed.json; then
    step "installing Claude Code, Codex and OpenCode"
    cp tests/agents/package.json .weft/agents/package.json
    npm install --prefix .weft/agents --no-fund --no-audit --no-package-lock --loglevel error
    cp tests/agents/package.json .weft/agents/installed.json
fi
exec .venv/bin/python -m pytest tests/agents --agents .weft/agents "$@"
