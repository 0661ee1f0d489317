#!/usr/bin/env bash
# One command from a fresh checkout: a byte-level GPT trained in FP8 on four CPU ranks, and in FP32 beside it.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
RANKS=4

usage() {
    cat <<TEXT
usage: bash launch/quickstart.sh [--data FILE] [--steps N] [--torch-index URL]

Makes .venv, then trains on $RANKS CPU ranks (2 pipeline ranks x 2 chunks x 2 replicas), first in FP8, then in
FP32, and compares both. Needs Python 3.11 or newer; after the installation it takes about 3 minutes on 2 cores.

  --data FILE        text to train on (default: the documentation of Python's standard library)
  --steps N          optimizer steps of each run (default: 100)
  --torch-index URL  package index to take torch from, for example one that offers CPU builds

Results: runs/<time>/report.html, and summary.json, metrics.jsonl, metrics-fp32.jsonl, losses-and-scales.png
Exit code 0: both runs finished and all ranks' FP8 scales agree.
TEXT
}

refuse() { printf 'quickstart: %s\n' "$*" >&2; exit 2; }

data="" steps=100 setup_options=()
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --data | --steps | --torch-index) [ $# -ge 2 ] || refuse "expected a value after $1; see --help" ;;
        *) refuse "expected --data, --steps or --torch-index but got $1; see --help" ;;
    esac
    case "$1" in
        --data) data="$2" ;;
        --steps) steps="$2" ;;
        --torch-index) setup_options=(--torch-index "$2") ;;
    esac
    shift 2
done
[[ "$steps" =~ ^[1-9][0-9]*$ ]] || refuse "expected --steps to be a positive whole number but got '$steps'"
[ -z "$data" ] || [ -r "$data" ] || refuse "expected a readable text file for --data but got '$data'"

bash "$ROOT/launch/setup_venv.sh" "$ROOT/.venv" monitor "${setup_options[@]}" >/dev/null
python="$ROOT/.venv/bin/python"

# The same result on every machine: no GPU, one thread a rank, and only the loopback interface.
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 PYTHONPATH="$ROOT/launch" PYTHONWARNINGS=ignore
if [ -e /sys/class/net/lo ]; then export GLOO_SOCKET_IFNAME=lo; fi

options=(
    --steps "$steps" --device cpu --no-plot
    --schedule interleaved1f1b --pp 2 --chunks 2 --dp 2 --microbatches 8
)
if [ -n "$data" ]; then  # a text that is too short ends here, with one line and before any rank starts
    "$python" "$ROOT/launch/train_gpt.py" "${options[@]}" --data "$data" --dry-run >/dev/null
fi
run_dir="$ROOT/runs/$(date +%Y%m%d-%H%M%S)-$$"
mkdir -p "$run_dir"
if [ -z "$data" ]; then
    data="$run_dir/corpus.txt"
    "$python" "$ROOT/launch/gpt/corpus.py" "$data"
fi

for precision in fp8 fp32; do
    "$python" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$RANKS" \
        "$ROOT/launch/train_gpt.py" "${options[@]}" --data "$data" --precision "$precision" \
        --run-dir "$run_dir/$precision"
done
status=0
"$python" -m gpt.report "$run_dir" || status=$?
"$python" -m fp8dist.cli report "$run_dir" || [ $? -eq 1 ] # 1: it names something to look at
exit $status
