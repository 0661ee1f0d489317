#!/usr/bin/env bash
# All tests with one command, from a machine that has nothing but Python 3.11 or newer.
set -uo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PARTS="unit kernels frameworks faults mpi2 mpi4 torchrun"
EXTRAS=mpi,dev,monitor

usage() {
    cat <<TEXT
usage: bash tests/run.sh [--part PART] [--torch VERSIONS] [--mpi openmpi|mpich] [-- PYTEST_OPTIONS]

  --part PART        run one part only: unit, kernels (GPUs), frameworks (skipped without that extra),
                     faults (ranks that fail, and GPUs where there are any), mpi2, mpi4
                     (tests/distributed under mpirun), torchrun
  --torch VERSIONS   long mode: everything again per torch release ("2.11.0,2.12.1"), each in a
                     virtual environment of its own (.venv-torch-2.11.0 ...)
  --mpi NAME         the MPI from pip to use; mpich gets an environment of its own (.venv-mpich)
  -- ...             the rest goes to pytest, for example: -- -k harness -x

Takes \$FP8DIST_VENV, else an active virtual environment that has all that is needed, else .venv, which it
makes and fills; it says what it downloads. Every part runs, also after a failure in an earlier one.
TEXT
}

die() { printf 'tests/run.sh: error: %s\n' "$*" >&2; exit 2; }

parts="$PARTS" releases="" mpi=openmpi
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --part | --torch | --mpi)
            [ $# -ge 2 ] || { usage >&2; die "$1 expects a value"; }
            case "$1" in --part) parts="$2" ;; --torch) releases="${2//,/ }" ;; --mpi) mpi="$2" ;; esac
            shift 2 ;;
        --) shift; break ;;
        *) usage >&2; die "unknown option $1" ;;
    esac
done
case " $PARTS " in *" $parts "*) ;; *) die "expected a part of: $PARTS; got '$parts'" ;; esac
case "$mpi" in openmpi | mpich) ;; *) die "expected --mpi openmpi or mpich but got '$mpi'" ;; esac

# Does the environment of the interpreter $1 have all that the tests need?
complete() {
    [ -x "$1" ] && "$1" - "$mpi" <<'PY'
import sys
from importlib import metadata
from pathlib import Path

needed = "torch numpy rich safetensors typer pytest pytest-mpi pytest-timeout pytest-xdist hypothesis mpi4py".split()
try:
    for name in [*needed, sys.argv[1]]:
        metadata.version(name)
except metadata.PackageNotFoundError:
    sys.exit(1)
sys.exit(not Path(sys.executable).with_name("mpirun").exists())
PY
}

# Both wheels own bin/mpirun, and singletons of the wrong one would pass all tests without testing anything.
refuse_two_mpis() {
    "$1" -c 'import sys; from importlib import metadata as m
sys.exit(len({d.name.lower() for d in m.distributions()} & {"openmpi", "mpich"}) > 1)' ||
        die "expected one MPI in ${1%/bin/python} but got openmpi and mpich; remove that environment and run again"
}

# Leaves the interpreter to use in $python. $1: torch release, or "" for the default.
prepare() {
    local directory="$ROOT/.venv${1:+-torch-$1}" torch=()
    [ "$mpi" = openmpi ] || directory="$directory-$mpi"
    [ -z "$1" ] || torch=(--torch "$1")
    if [ -z "$1" ]; then
        if [ -n "${FP8DIST_VENV:-}" ]; then
            directory="$FP8DIST_VENV"
        elif [ -n "${VIRTUAL_ENV:-}" ] && complete "$VIRTUAL_ENV/bin/python"; then
            directory="$VIRTUAL_ENV"
        fi
    fi
    python="$directory/bin/python"
    # An environment that somebody else made is used as it is; only our own ones follow constraints.txt.
    if [ "$directory" = "${directory#"$ROOT"/.venv}" ] && complete "$python"; then
        refuse_two_mpis "$python"
        return 0
    fi
    if [ "$mpi" = openmpi ]; then
        bash "$ROOT/launch/setup_venv.sh" "$directory" "$EXTRAS" "${torch[@]}" >/dev/null || return 1
    else
        bash "$ROOT/launch/setup_venv.sh" "$directory" dev,monitor "${torch[@]}" >/dev/null || return 1
        if ! complete "$python"; then
            echo "setup: downloading mpi4py and $mpi" >&2
            "$python" -m pip install -qq --no-input -c "$ROOT/constraints.txt" mpi4py "$mpi" || return 1
        fi
    fi
    refuse_two_mpis "$python"
    complete "$python" ||
        die "expected torch, $mpi, mpi4py and the dev extra in $directory but not all are there;" \
            "remove that environment and run again"
}

# $1: seconds. TERM first: an mpirun that gets KILL leaves its ranks behind.
limited() {
    local seconds="$1"
    shift
    if command -v timeout >/dev/null; then timeout -k 15 "$seconds" "$@"; else "$@"; fi
}

run_pytest() {
    local limit="$1"
    shift
    limited "$limit" "$python" -m pytest "$@"
}

run_mpi() {
    local ranks="$1"
    shift
    # Root and more ranks than cores are normal here. The ofi transport costs a second of sleep at start-up,
    # and the ucx windows print an error line; nobody needs them on one host.
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
        PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe \
        OMPI_MCA_btl=self,sm OMPI_MCA_osc=^ucx MPIEXEC_TIMEOUT=600 \
        limited 660 "$(dirname "$python")/mpirun" -n "$ranks" "$python" -m pytest \
        --with-mpi --world-size "$ranks" -p no:cacheprovider --color=no -q tests/distributed "$@"
}

# $1: part, the rest: for pytest.
run_part() {
    case "$1" in
        # Two workers; a file stays with one of them.
        unit) run_pytest 1200 -n 2 --dist loadfile tests/unit "${@:2}" ;;
        kernels) run_pytest 1200 tests/kernels "${@:2}" ;; # in its own process, which uses the GPU
        frameworks) run_pytest 900 tests/frameworks "${@:2}" ;;
        faults) run_pytest 1200 tests/faults tests/gpu "${@:2}" ;;
        mpi2) run_mpi 2 "${@:2}" ;;
        mpi4) run_mpi 4 "${@:2}" ;;
        torchrun) run_pytest 600 tests/torchrun "${@:2}" ;;
    esac
}

cd "$ROOT" || exit 2
reports="$(mktemp -d)"
started="$(date +%s.%N)"
trap 'rm -rf "$reports"' EXIT
trap 'exit 130' INT
export OMP_NUM_THREADS=1 PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

results=() python=""
for release in ${releases:-default}; do
    label=""
    [ "$release" = default ] || label="torch-$release/"
    if ! prepare "${label:+$release}"; then
        results+=("${label}setup=1=$reports/none")
        continue
    fi
    echo "testing with $python ($mpi)"
    for part in $parts; do
        printf '\n==== %s ====\n' "$label$part"
        report="$reports/${label//\//-}$part.xml"
        run_part "$part" --junitxml="$report" "$@" </dev/null
        results+=("$label$part=$?=$report")
    done
done

echo
interpreter="$python"
[ -x "$interpreter" ] || interpreter=python3
"$interpreter" tests/summary.py "$started" "${results[@]}"
