#!/usr/bin/env bash
# What a card is needed for, in one command of less than nine minutes, without a network:
#
#   make gpu-wheels                                    # on a machine with a network: fills .gpu-wheels
#   bash benchmarks/gpu_queue.sh                       # on the one with a card: equality kernels graphs steps runs
#   bash benchmarks/gpu_queue.sh tests tiles kernels   # these stages in this order
#   bash benchmarks/gpu_queue.sh --dry                 # anywhere: tiny sizes on the CPU, through Triton's interpreter
#
# Each stage has a limit in seconds and a file of results in $OUT; none stops those after it. First, the wheels of what
# the machine lacks are installed (install.txt); Recurra itself runs from src.
#
#   equality   60 s  every kernel and every mixer on the card beside float64 on the CPU (equality.json)
#   kernels    60 s  GB/s of each operator beside a copy, and other libraries if they are installed (kernels.json)
#   graphs     60 s  with CUDA graphs and without: equality, ms an update or a token, memory, tokens/s (graphs.json)
#   steps      90 s  training steps of published recipes: tokens/s and MFU (steps.json)
#   runs             long runs in what time is left; runs that are in $RUNS already are resumed (runs.tar.gz)
#   tests     100 s  the tests of the Triton kernels on the card (tests.txt)
#   contracts  60 s  the contract suite: every mixer and model there (contracts.txt)
#   tiles     130 s  the best tiles and chunk lengths, which later stages use (tiles.json; to keep them:
#                    python -m benchmarks.gpu.tuning --adopt $OUT/tiles.json)
#
# queue.log has what all of them said. Wheels, for what a machine with PyTorch and Triton may lack (import name:package):
WHEELS="jsonargparse:jsonargparse docstring_parser:docstring-parser typeshed_client:typeshed-client
importlib_resources:importlib-resources platformdirs:platformdirs lightning_fabric:lightning-fabric
lightning_utilities:lightning-utilities hypothesis:hypothesis sortedcontainers:sortedcontainers beartype:beartype
jaxtyping:jaxtyping wadler_lindig:wadler-lindig pytest_randomly:pytest-randomly tokenizers:tokenizers
safetensors:safetensors rich:rich markdown_it:markdown-it-py mdurl:mdurl
accelerated_scan:accelerated-scan fla:fla-core einops:einops"
# llvmlite and numba take 64 MB and are not among them: without them the CPU's side is plain torch.
#
# PYTHON  the interpreter (python3)          RUNS   folder of the long runs (runs/gpu-runs)
# OUT     folder of results (runs/gpu)       LIMIT  seconds for everything (525)
# FOLDER  of the wheels (.gpu-wheels)        JOBS   processes that compile kernels (12; 1 in a dry run)
# DATA    folder of Penn Treebank (data/ptb; without it, its runs are left out)
set -u
cd "$(dirname "$0")/.." || exit
[ "${1:-}" = --list ] && { for pair in $WHEELS; do echo "${pair#*:}"; done; exit; }
DRY=""
[ "${1:-}" = --dry ] && { DRY=--dry JOBS=${JOBS:-1}; shift; }
[ $# -gt 0 ] || set -- equality kernels graphs steps runs
FOLDER=${FOLDER:-.gpu-wheels} PYTHON=${PYTHON:-python3} OUT=${OUT:-runs/gpu} RUNS=${RUNS:-runs/gpu-runs}
DATA=${DATA:-data/ptb} LIMIT=${LIMIT:-525} JOBS=${JOBS:-12}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd) SITE=$(mktemp -d)
trap 'rm -rf "$SITE"' EXIT
export PYTHONPATH="$PWD/src:$PWD:$SITE${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
LOG=$OUT/queue.log SUMMARY="" FAILED=0
: >"$LOG"

stage() { # NAME SECONDS COMMAND...: run a command within its limit and what time is left, and note how it ended
  local name=$1 limit=$2 began=$SECONDS before rc
  shift 2
  [ -n "$DRY" ] && limit=$((3 * limit)) # the interpreter is slow
  [ $((LIMIT - SECONDS)) -lt "$limit" ] && limit=$((LIMIT - SECONDS))
  before=$(wc -l <"$LOG")
  if [ "$limit" -lt 1 ]; then
    rc=skipped
  else
    echo "== $name, at most $limit s: $*" >>"$LOG"
    timeout -s "${STOP:-TERM}" -k 20 "$limit" "$@" >>"$LOG" 2>&1
    rc=$?
  fi
  [ "$rc" = 0 ] || FAILED=1
  tail -n +$((before + 1)) "$LOG" | tail -n 12
  SUMMARY+=$(printf '%-10s %4s s  %s' "$name" $((SECONDS - began)) "$rc")$'\n'
}

install() {
  local missing package
  missing=$("$PYTHON" -c "
import sys
from importlib.util import find_spec
print(*(pair.partition(':')[2] for pair in sys.argv[1:] if not find_spec(pair.partition(':')[0])))" $WHEELS)
  echo "missing: ${missing:-nothing}"
  local found=() wheel
  for package in $missing; do # a wheel that is not there must not keep the others out
    wheel=$(ls "$FOLDER"/"${package//-/_}"-*.whl 2>/dev/null | head -n 1)
    if [ -n "$wheel" ]; then found+=("$wheel"); else echo "without $package"; fi
  done
  [ ${#found[@]} -gt 0 ] &&
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$SITE" "${found[@]}"
  "$PYTHON" -c "import torch, recurra; print(torch.__version__, torch.cuda.is_available(), recurra.__file__)"
}

run_of() { # NAME RECIPE OVERRIDES...: train, or resume, until it ends or the time does; score it if it ended
  local name=$1 recipe=$2 seconds=$((LIMIT - SECONDS - 25))
  shift 2
  [ "$seconds" -lt 1 ] && return
  local words=("$recipe" --run-dir "$RUNS/$name")
  [ -f "$RUNS/$name/config.yaml" ] && words=(--resume "$RUNS/$name")
  timeout -k 20 "$seconds" "$PYTHON" -m recurra train "${words[@]}" --training.tensorboard false "$@" &&
    timeout -k 2 20 "$PYTHON" -m recurra eval "$RUNS/$name"
}

share() { # NVIDIA's multi-process service, where it can be had: kernels of several processes run at once
  export CUDA_MPS_PIPE_DIRECTORY=$SITE/mps CUDA_MPS_LOG_DIRECTORY=$SITE/mps
  mkdir -p "$SITE/mps"
  nvidia-cuda-mps-control -d && timeout -k 2 25 "$PYTHON" -c "import torch; torch.ones(1, device='cuda')" && return
  echo quit | timeout -k 2 5 nvidia-cuda-mps-control
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}

runs() { # side by side: such small models leave most of a card idle
  local device=(--training.accelerator cuda --training.threads 1 --training.save_every 500)
  if [ -n "$DRY" ]; then
    RUNS=$SITE/runs
    run_of memory-horizon recipes/memory-horizon/data-controlled-muon.yaml --training.accelerator cpu --model.n_layer 1 \
      --data.n_samples 40 --data.sequence_length 32 --data.window_lengths "[16]" --data.window_epochs "[1]" \
      --training.epochs 1 --training.threads 1 || return
  else
    share
    run_of memory-horizon recipes/memory-horizon/data-controlled-muon.yaml "${device[@]}" &
    if [ -d "$DATA" ]; then
      for variant in crt-gru-n70 crt-ncgru-n70 crt-gru-n17; do
        run_of "ptb-$variant-40-epochs" "recipes/ptb/three-layers-muon.yaml#$variant-40-epochs" "${device[@]}" \
          --data.path "$DATA" --training.precision bf16-mixed --training.eval_every 414 --training.log_every 69 &
      done
    fi
    wait
    echo quit | timeout -k 2 5 nvidia-cuda-mps-control
  fi
  mkdir -p "$RUNS" # checkpoints of large models stay there
  (cd "$RUNS" && find . -type f -size -6M ! -name .lock -print0 | tar czf "$OUT/runs.tar.gz" --null -T -)
}

tested() { # FILE TEST...: to a file of results; stopped as by Ctrl-C, what is cut off says what failed so far
  local file=$1 how=(--collect-only -q)
  shift
  [ -n "$DRY" ] || how=(-vv)
  # compiling takes most of the time
  [ -z "$DRY" ] && "$PYTHON" -c "import xdist" 2>/dev/null && how+=(-n 8 --dist worksteal)
  RECURRA_SHAPE_CHECKS=0 exec "$PYTHON" -m pytest -p no:randomly "${how[@]}" "$@" >"$OUT/$file" 2>&1
}

export -f install run_of share runs tested
export WHEELS DRY FOLDER PYTHON OUT RUNS DATA SITE

stage install 40 bash -c 'set -o pipefail; install 2>&1 | tee "$OUT/install.txt"'
for name in "$@"; do
  # shellcheck disable=SC2086
  case $name in
  equality) # its processes share the cores for the CPU's side
    OMP_NUM_THREADS=2 NUMBA_NUM_THREADS=2 stage equality 60 "$PYTHON" -m benchmarks.gpu.golden $DRY --jobs "$JOBS" --out "$OUT/equality.json" ;;
  kernels) stage kernels 60 "$PYTHON" -m benchmarks.gpu $DRY --out "$OUT/kernels.json" ;;
  graphs) stage graphs 60 "$PYTHON" -m benchmarks.gpu.graphs $DRY --out "$OUT/graphs.json" ;;
  steps) stage steps 90 "$PYTHON" -m benchmarks.gpu.steps $DRY --out "$OUT/steps.json" ;;
  tests)
    STOP=INT TRITON_INTERPRET=$((${#DRY} > 0)) stage tests 100 bash -c 'tested tests.txt tests/ops/*/interpreted_triton*.py'
    tail -n 3 "$OUT/tests.txt" ;;
  contracts)
    STOP=INT RECURRA_TEST_DEVICE=$([ -n "$DRY" ] || echo cuda) stage contracts 60 bash -c 'tested contracts.txt tests/contracts/test_{cut_invariance,variable_lengths,states}.py'
    tail -n 3 "$OUT/contracts.txt" ;;
  tiles)
    stage tiles 130 "$PYTHON" -m benchmarks.gpu.tuning $DRY --jobs "$JOBS" --seconds 110 --out "$OUT/tiles.json"
    [ -f "$OUT/tiles.json" ] && export RECURRA_TILES="$OUT/tiles.json" ;;
  runs) # bash counts the seconds of a new shell from 0
    LEFT=$((LIMIT - SECONDS))
    LIMIT=$LEFT SECONDS=0
    export LIMIT
    stage runs "$LEFT" bash -c runs ;;
  *) echo "no stage $name" >&2; FAILED=1 ;;
  esac
done
printf '\n%s' "$SUMMARY" | tee -a "$LOG"
exit $FAILED
