#!/usr/bin/env bash
# The page in headless Chromium: installs a browser and its driver where they are missing, then runs tests/page; with
# `--install` it only installs the browser. Ends with status 77 where they cannot be had, which is no failure of the page.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/system.sh
unset PYTHONDONTWRITEBYTECODE # as in test.sh

skip() {
    note "skipped: $1"
    exit 77
}

command -v chromium >/dev/null || apt_install chromium || skip "the tests of the page need Chromium (apt install chromium)"
if [ "${1:-}" = --install ]; then exit; fi
# it alone: to install Weft again takes it away for a moment, and others may run from here
.venv/bin/python -m pip install -q -c constraints.txt playwright ||
    skip "the tests of the page need playwright, which pip could not install"
exec .venv/bin/python -m pytest tests/page --browser "$@"
