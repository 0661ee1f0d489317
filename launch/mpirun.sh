#!/usr/bin/env bash
# launch/train_gpt.py under mpirun: where a cluster starts jobs through MPI, or where there is no torchrun.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

usage() {
    cat <<TEXT
usage: bash launch/mpirun.sh --ranks N [OPTIONS] -- FLAGS OF launch/train_gpt.py

  --ranks N        processes in all
  --hostfile FILE  hosts, as mpirun takes them (default: this host)
  --oversubscribe  allow more processes than cores
  --print          print the command and stop

A rank that dies ends the job (MPI has no restarts): start the same command again, it goes on from the last checkpoint.
Open MPI; the mpirun beside the Python that runs comes first, since it belongs to the library that mpi4py loads.
TEXT
}

refuse() { printf 'mpirun.sh: %s\n' "$*" >&2; exit 2; }

ranks="" hostfile="" oversubscribe="" print=""
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --print) print=yes; shift ;;
        --oversubscribe) oversubscribe=yes; shift ;;
        --) shift; break ;;
        --ranks | --hostfile)
            [ $# -ge 2 ] || refuse "expected a value after $1; see --help"
            if [ "$1" = --ranks ]; then ranks="$2"; else hostfile="$2"; fi
            shift 2 ;;
        *) refuse "expected an option or -- before the program's flags but got $1; see --help" ;;
    esac
done
[[ "$ranks" =~ ^[1-9][0-9]*$ ]] || refuse "expected --ranks to be a whole number >= 1 but got '$ranks'"
[ -z "$hostfile" ] || [ -r "$hostfile" ] || refuse "expected a readable --hostfile but got '$hostfile'"

python="$ROOT/.venv/bin/python"
[ -z "${VIRTUAL_ENV:-}" ] || python="$VIRTUAL_ENV/bin/python"
[ -x "$python" ] || python="$(command -v python3)" || refuse "expected Python 3.11 or newer on PATH"
mpirun="$(dirname "$python")/mpirun"
[ -x "$mpirun" ] || mpirun="$(command -v mpirun)" || refuse "expected an mpirun beside $python or on PATH"

command=("$mpirun" -n "$ranks")
[ -z "$hostfile" ] || command+=(--hostfile "$hostfile")
[ -z "$oversubscribe" ] || command+=(--map-by :oversubscribe)
[ "$(id -u)" -ne 0 ] || command+=(--allow-run-as-root) # containers
command+=("$python" "$ROOT/launch/train_gpt.py" "$@")

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
if [ -n "$print" ]; then
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi
exec "${command[@]}"
