#!/usr/bin/env bash
# Makes a virtual environment with torch and this package in it, or completes one that exists.
set -euo pipefail

DEFAULT_TORCH=2.13.0
OLDEST_TORCH=2.11
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

usage() {
    cat <<TEXT
usage: setup_venv.sh VENV_DIR EXTRAS [--torch VERSION] [--torch-index URL]

  VENV_DIR           created if it does not exist; VENV_DIR/bin/python is ready afterwards
  EXTRAS             extras of this package, comma separated ("mpi,dev"), or "" for none
  --torch VERSION    exactly this torch release (default: an installed torch >= $OLDEST_TORCH, else $DEFAULT_TORCH)
  --torch-index URL  package index to take torch from, for example one that offers CPU builds

Set PYTHON to choose the interpreter (>= 3.11). A second run with nothing to do ends at once.
TEXT
}

say() { printf 'setup: %s\n' "$*" >&2; }
die() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

venv_dir="" extras="" torch_version="" torch_index="" positional=0
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --torch) [ $# -ge 2 ] || die "--torch expects a version, for example --torch $DEFAULT_TORCH"; torch_version="$2"; shift 2 ;;
        --torch-index) [ $# -ge 2 ] || die "--torch-index expects a URL"; torch_index="$2"; shift 2 ;;
        -*) usage >&2; die "unknown option $1" ;;
        *)
            case $positional in
                0) venv_dir="$1" ;;
                1) extras="$1" ;;
                *) usage >&2; die "expected VENV_DIR and EXTRAS but got one more argument: $1" ;;
            esac
            positional=$((positional + 1)); shift ;;
    esac
done
[ $positional -eq 2 ] || { usage >&2; die "expected VENV_DIR and EXTRAS but got $positional argument(s)"; }
python="$venv_dir/bin/python"

find_python() {
    local name
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            # A venv made from a venv's interpreter sees the packages of the base, so that is the one to ask.
            "$name" -c 'import sys; print(sys._base_executable)'
            return
        fi
    done
    die "expected Python 3.11 or newer but got $("${PYTHON:-python3}" --version 2>&1 || true);" \
        "install one and name it: PYTHON=/path/to/python3.11 $0 ..."
}

# Prints the torch release that the interpreter $1 has, without its local tag; nothing if it has none.
installed_torch() {
    "$1" - <<'PY'
from importlib import metadata

try:
    print(metadata.version("torch").split("+")[0])
except metadata.PackageNotFoundError:
    pass
PY
}

# Is the release $1 the one that was asked for, or, if none was, new enough?
torch_fits() {
    [ -n "$1" ] || return 1
    if [ -n "$torch_version" ]; then [ "$1" = "${torch_version%%+*}" ]; return; fi
    [ "$(printf '%s\n%s\n' "$OLDEST_TORCH" "$1" | sort -V | head -n 1)" = "$OLDEST_TORCH" ]
}

pip_install() { "$python" -m pip install -qq --no-input --disable-pip-version-check "$@"; }

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 || [ -e /dev/nvidia0 ]; }

install_torch() {
    local version="${torch_version:-$DEFAULT_TORCH}"
    if [ -n "$torch_index" ]; then
        say "downloading torch $version from the index that you named"
        pip_install --index-url "$torch_index" "torch==$version"
        return
    fi
    if ! has_gpu && [[ "$version" != *+* ]]; then
        say "downloading torch $version, the CPU build if your package index offers it (about 200 MB)"
        # No release of that name is the usual case and not worth a line; the plain build is next.
        if pip_install "torch==$version+cpu" 2>/dev/null; then return; fi
        say "no CPU build there (--torch-index URL names another index)"
    fi
    say "downloading torch $version as your package index has it (on Linux up to 3 GB with its CUDA libraries)"
    pip_install "torch==$version"
}

# Line 1 of the stamp: what the installed packages were resolved from. Line 2: the extras that are installed.
stamp="$venv_dir/fp8dist-setup.stamp"
fingerprint="$(cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | cksum) $ROOT"
stamped_extras=""
if [ -f "$stamp" ] && [ -x "$python" ] && [ "$(sed -n 1p "$stamp")" = "$fingerprint" ]; then
    stamped_extras="$(sed -n 2p "$stamp")"
    missing=0
    for extra in ${extras//,/ }; do
        case ",$stamped_extras," in *",$extra,"*) ;; *) missing=1 ;; esac
    done
    if [ $missing -eq 0 ] && torch_fits "$(installed_torch "$python")"; then
        echo "$python"
        exit 0
    fi
fi

# A creation that was interrupted, or another tool's environment, may lack pip: creating it again adds it.
if ! "$python" -c 'import pip' 2>/dev/null; then
    base="$(find_python)"
    options=()
    system_torch="$(installed_torch "$base")"
    if torch_fits "$system_torch"; then
        say "reusing the installed torch $system_torch of $base"
        options=(--system-site-packages)
    fi
    say "creating $venv_dir with $("$base" --version)"
    "$base" -m venv "${options[@]}" "$venv_dir" ||
        die "$base cannot create virtual environments; install its venv module (Debian, Ubuntu: apt install python3-venv)"
    echo '*' > "$venv_dir/.gitignore"
fi

rm -f "$stamp"
torch_fits "$(installed_torch "$python")" || install_torch
say "downloading what fp8dist${extras:+[$extras]} needs besides torch (at most 250 MB; releases in constraints.txt)"
pip_install -e "$ROOT${extras:+[$extras]}" -c "$ROOT/constraints.txt"
torch_fits "$(installed_torch "$python")" || die "expected torch ${torch_version:->= $OLDEST_TORCH} in $venv_dir but got '$(installed_torch "$python")'; remove $venv_dir and run again"
printf '%s\n%s\n' "$fingerprint" "$stamped_extras${extras:+,$extras}" > "$stamp"
echo "$python"
