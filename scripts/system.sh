# Sourced by the scripts that install: words for people, the Python to use, and the few system packages that no wheel brings.

bold=''
plain=''
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then
    bold=$'\033[1m'
    plain=$'\033[0m'
fi

step() { printf '%s==> %s%s\n' "$bold" "$*" "$plain"; }
note() { printf '    %s\n' "$@"; }
die() {
    printf 'error: %s\n' "$1" >&2
    shift
    if [ $# -gt 0 ]; then printf '       %s\n' "$@" >&2; fi
    exit 1
}

pick_python() {
    local candidate candidates=(python3 python3.13 python3.12 python3.11 python3.14 python)
    if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    die "Weft needs Python 3.11 or newer${PYTHON:+, and PYTHON=$PYTHON is not}." \
        "Install one (Debian 12, Ubuntu 24.04 and newer: apt install python3 python3-venv; Ubuntu 22.04: apt install python3.11 python3.11-venv; macOS: brew install python) or name one: make PYTHON=/path/to/python3 serve"
}

# Installs Debian packages where that needs no password; fails otherwise. One at a time: apt fails while another one runs.
apt_install() {
    local run=()
    command -v apt-get >/dev/null || return 1
    if [ "$(id -u)" != 0 ]; then
        sudo -n true 2>/dev/null || return 1
        run=(sudo -n)
    fi
    step "installing system packages: $*"
    (
        flock -w 600 9 || die "Another installation of system packages has run for 10 minutes. Wait for its end, and try again."
        "${run[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -qq </dev/null 9>&- || true
        "${run[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" </dev/null 9>&-
    ) 9>"${TMPDIR:-/tmp}/weft-apt-$(id -u).lock"
}

# Whether the torch that is installed asks for a Triton of its own, in one version: a build with CUDA does, on whatever machine, and no other
# may stand beside it. By what its wheel says: it may lack half of what it needs to be imported.
brings_triton() {
    "$1" -c '
import importlib.metadata, sys
lines = importlib.metadata.requires("torch") or []
sys.exit(not any(line.startswith(("triton", "pytorch-triton")) for line in lines))'
}

# Mooncake's wheels load libraries that belong to the system. Without them Weft still runs: KV blocks then travel over gRPC.
check_mooncake() {
    local python="$1" packages="libibverbs1 ibverbs-providers librdmacm1 libnuma1 libcurl4 liburing2" why
    if why="$("$python" -m weft.kv.mooncake 2>&1)"; then return; fi
    # shellcheck disable=SC2086
    if apt_install $packages && why="$("$python" -m weft.kv.mooncake 2>&1)"; then return; fi
    step "Mooncake does not load; KV blocks will travel over gRPC, which is slower"
    note "${why##*$'\n'}" "On Debian and Ubuntu its libraries come with: sudo apt install $packages" \
        "Then remove .venv/.installed-* and run make again."
}
