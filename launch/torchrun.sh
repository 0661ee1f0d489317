#!/usr/bin/env bash
# launch/train_gpt.py under torchrun, on one or several hosts; a failed rank restarts all of them from the last checkpoint.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

usage() {
    cat <<TEXT
usage: bash launch/torchrun.sh [OPTIONS] -- FLAGS OF launch/train_gpt.py

  --ranks N          processes on this host (default: its GPUs, or 1)
  --nnodes N         hosts (default: 1); run the same command on each
  --master HOST:PORT where the hosts meet; needed for several (default port: 29500)
  --node-rank R      0 on the host named by --master, where its own name does not tell; else leave it out
  --id NAME          tells jobs apart that meet at one address (default: fp8dist)
  --max-restarts N   how often a failure may restart the job (default: 3)
  --print            print the command and stop

Example, four CPU ranks on this host:
  bash launch/torchrun.sh --ranks 4 -- --pp 2 --dp 2 --steps 20 --checkpoint-every 10
TEXT
}

refuse() { printf 'torchrun.sh: %s\n' "$*" >&2; exit 2; }
number() { [[ "$2" =~ ^[0-9]+$ ]] && [ "$2" -ge "$3" ] || refuse "expected $1 to be a whole number >= $3 but got '$2'"; }

ranks="" nnodes=1 master="" node_rank="" id=fp8dist max_restarts=3 print=""
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --print) print=yes; shift; continue ;;
        --) shift; break ;;
        --ranks | --nnodes | --master | --node-rank | --id | --max-restarts)
            [ $# -ge 2 ] || refuse "expected a value after $1; see --help" ;;
        *) refuse "expected an option or -- before the program's flags but got $1; see --help" ;;
    esac
    case "$1" in
        --ranks) number "$1" "$2" 1; ranks="$2" ;;
        --nnodes) number "$1" "$2" 1; nnodes="$2" ;;
        --master) master="$2" ;;
        --node-rank) number "$1" "$2" 0; node_rank="$2" ;;
        --id) id="$2" ;;
        --max-restarts) number "$1" "$2" 0; max_restarts="$2" ;;
    esac
    shift 2
done
[ "$nnodes" -eq 1 ] || [ -n "$master" ] || refuse "expected --master HOST:PORT with --nnodes $nnodes; see --help"
[ -z "$node_rank" ] || [ "$node_rank" -lt "$nnodes" ] || refuse "expected --node-rank below --nnodes $nnodes but got $node_rank"

python="$ROOT/.venv/bin/python"
[ -z "${VIRTUAL_ENV:-}" ] || python="$VIRTUAL_ENV/bin/python"
[ -x "$python" ] || python="$(command -v python3)" || refuse "expected Python 3.11 or newer on PATH"
if [ -z "$ranks" ]; then
    ranks="$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)"
    [ "${ranks:-0}" -gt 0 ] || ranks=1
fi

command=("$python" -m torch.distributed.run --nproc-per-node "$ranks" --max-restarts "$max_restarts")
if [ "$nnodes" -eq 1 ]; then
    command+=(--standalone)
else
    case "$master" in *:*) ;; *) master="$master:29500" ;; esac
    command+=(--nnodes "$nnodes" --rdzv-backend c10d --rdzv-endpoint "$master" --rdzv-id "$id")
    # Behind a service name no host recognises itself, and nobody would serve the meeting.
    if [ "$node_rank" = 0 ]; then
        command+=(--rdzv-conf is_host=true)
    elif [ -n "$node_rank" ]; then
        command+=(--rdzv-conf is_host=false)
    fi
fi
command+=("$ROOT/launch/train_gpt.py" "$@")

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
if [ -n "$print" ]; then
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi
exec "${command[@]}"
