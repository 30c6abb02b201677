#!/usr/bin/env bash
# The page in headless Chromium: installs a browser and its driver where they are missing, then runs tests/page.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/system.sh

command -v chromium >/dev/null || apt_install chromium || die "The tests of the page need Chromium." \
    "Install it and try again: apt install chromium"
.venv/bin/python -m pip install -q -c constraints.txt -e ".[page]" --no-build-isolation
exec .venv/bin/python -m pytest tests/page --browser "$@"
