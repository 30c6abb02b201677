#!/usr/bin/env bash
# Style, types, import directions, wire contracts, compose. Runs everything, then fails if anything did.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
failed=()

check() {
    local name="$1"
    shift
    printf '%-22s ' "$name"
    local out
    if out="$("$@" 2>&1)"; then
        echo ok
    else
        echo FAILED
        printf '%s\n' "$out"
        failed+=("$name")
    fi
}

# Its workers have some seconds to start, which a busy machine may not have for them; 2 is its own trouble, 1 ours.
types() {
    local status=0
    $bin/mypy --num-workers 2 || status=$?
    [ $status != 2 ] || { status=0 && $bin/mypy || status=$?; }
    return $status
}

# The rule is younger than the history; a shallow clone does not contain its first commit.
subjects() {
    local first=b5f04702d791aefc45f2e68e724b6b774c152e38
    git merge-base --is-ancestor "$first" HEAD 2>/dev/null || return 0
    git log --no-merges --format=%s "$first..HEAD" | awk 'length($0) > 72 { print; found = 1 } END { exit found }'
}

check "commit subjects" subjects
check "ruff" $bin/ruff check --output-format=concise .
check "ruff format" $bin/ruff format --check .
check "mypy --strict" types
check "import directions" $bin/lint-imports
check "generated code fresh" $bin/python protos/compile.py --check
check "compose schema" $bin/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml
# buf is a node package; its rules are checked wherever node is
if command -v npx >/dev/null && timeout 120 npx --yes @bufbuild/buf@1.75.0 --version >/dev/null 2>&1 </dev/null; then
    check "buf lint" npx --yes @bufbuild/buf@1.75.0 lint protos
else
    echo "buf lint               skipped: needs npx and the npm registry"
fi

if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi
