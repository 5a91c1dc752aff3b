#!/usr/bin/env bash
# All that a card is needed for, in one command of less than nine minutes, without a network:
#
#   make gpu-wheels                                        # on a machine with a network: fills .gpu-wheels
#   OUT=runs/gpu bash benchmarks/gpu_queue.sh .gpu-wheels  # on the one with a card
#   bash benchmarks/gpu_queue.sh --dry                     # anywhere: tiny sizes on the CPU, through Triton's interpreter
#
# Each stage has a limit in seconds and a file of results in $OUT; none stops those after it. All limits together are
# less than LIMIT.
#
#   1-install.txt     wheels of what the machine lacks; Recurra itself runs from src
#   2-tests.txt       the tests of the Triton kernels on the card, then the contract suite: every mixer and model there
#   3-golden.json     every kernel and every mixer on the card beside float64 on the CPU
#   4-speed.json      GB/s of the scan and of the GateLoop beside a copy, and other libraries if they are installed
#   5-tiles.json      the best tiles and chunk lengths, which stages 6 and 7 use
#                     (keep them: python -m benchmarks.gpu.tuning --adopt $OUT/5-tiles.json)
#   6-steps.json      training steps of published recipes: tokens/s and MFU
#   7-runs.tar.gz     long runs in what time is left; runs that are in $RUNS already are resumed
#   queue.log         what all of them said
#
# Wheels, for what a machine with PyTorch and Triton may lack (import name, then the package):
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
# JOBS    processes that compile kernels (12; 1 in a dry run)
# DATA    folder of Penn Treebank (data/ptb; without it, its runs are left out)
set -u
cd "$(dirname "$0")/.." || exit
[ "${1:-}" = --list ] && { for pair in $WHEELS; do echo "${pair#*:}"; done; exit; }
DRY=""
[ "${1:-}" = --dry ] && { DRY=--dry JOBS=${JOBS:-1}; shift; }
FOLDER=${1:-.gpu-wheels} PYTHON=${PYTHON:-python3} OUT=${OUT:-runs/gpu} RUNS=${RUNS:-runs/gpu-runs}
DATA=${DATA:-data/ptb} LIMIT=${LIMIT:-525} JOBS=${JOBS:-12}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd) SITE=$(mktemp -d)
trap 'rm -rf "$SITE"' EXIT
export PYTHONPATH="$PWD/src:$PWD:$SITE${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
LOG=$OUT/queue.log SUMMARY="" FAILED=0 STOP=TERM
: >"$LOG"

stage() { # NAME SECONDS COMMAND...: run a command within its limit and what time is left, and note how it ended
  local name=$1 limit=$2 began=$SECONDS before rc
  shift 2
  [ $((LIMIT - SECONDS)) -lt "$limit" ] && limit=$((LIMIT - SECONDS))
  before=$(wc -l <"$LOG")
  if [ "$limit" -lt 1 ]; then
    rc=skipped
  else
    echo "== $name, at most $limit s: $*" >>"$LOG"
    timeout -s "$STOP" -k 20 "$limit" "$@" >>"$LOG" 2>&1
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
      --data.n_samples 40 --data.sequence_length 32 --training.epochs 1 --training.threads 1
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
  (cd "$RUNS" && find . -type f -size -6M ! -name .lock -print0 | tar czf "$OUT/7-runs.tar.gz" --null -T -)
}

export -f install run_of share runs
export WHEELS DRY FOLDER PYTHON OUT RUNS DATA SITE

# shellcheck disable=SC2086
{
  stage install 40 bash -c 'set -o pipefail; install 2>&1 | tee "$OUT/1-install.txt"'
  # Each test by itself, and stopped as by Ctrl-C: what is cut off by the time leaves the names of the tests before it,
  # and says what failed once xdist has waited 10 s for its workers.
  KERNELS="tests/ops/scan/interpreted_triton.py tests/ops/gate_loop/interpreted_triton.py tests/ops/gate_loop/interpreted_triton_chunk.py
tests/ops/cells/interpreted_triton_gru.py"
  export KERNELS RECURRA_SHAPE_CHECKS=0
  if [ -n "$DRY" ]; then
    TRITON_INTERPRET=1 stage tests 60 bash -c '"$PYTHON" -m pytest -p no:randomly --collect-only -q $KERNELS >"$OUT/2-tests.txt" 2>&1'
  else
    SPREAD=$("$PYTHON" -c "import xdist" 2>/dev/null && printf %s "-n 8 --dist worksteal") # compiling takes most of the time
    export SPREAD
    STOP=INT TRITON_INTERPRET=0 stage tests 100 bash -c '"$PYTHON" -m pytest -p no:randomly -vv $SPREAD $KERNELS >"$OUT/2-tests.txt" 2>&1'
  fi
  SUITE="tests/contracts/test_cut_invariance.py tests/contracts/test_variable_lengths.py tests/contracts/test_states.py"
  export SUITE
  if [ -n "$DRY" ]; then
    stage contracts 60 bash -c '"$PYTHON" -m pytest -p no:randomly --collect-only -q $SUITE >>"$OUT/2-tests.txt" 2>&1'
  else
    STOP=INT RECURRA_TEST_DEVICE=cuda stage contracts 60 bash -c '"$PYTHON" -m pytest -p no:randomly -v $SPREAD $SUITE >>"$OUT/2-tests.txt" 2>&1'
  fi
  unset RECURRA_SHAPE_CHECKS
  [ -f "$OUT/2-tests.txt" ] && tail -n 3 "$OUT/2-tests.txt"
  # Its processes share the cores for the CPU's side.
  OMP_NUM_THREADS=2 NUMBA_NUM_THREADS=2 stage golden 60 "$PYTHON" -m benchmarks.gpu.golden $DRY --jobs "$JOBS" --out "$OUT/3-golden.json"
  stage speed 60 "$PYTHON" -m benchmarks.gpu $DRY --out "$OUT/4-speed.json"
  stage tiles 130 "$PYTHON" -m benchmarks.gpu.tuning $DRY --jobs "$JOBS" --seconds 110 --out "$OUT/5-tiles.json"
  [ -f "$OUT/5-tiles.json" ] && export RECURRA_TILES="$OUT/5-tiles.json"
  stage steps 60 "$PYTHON" -m benchmarks.gpu.steps $DRY --out "$OUT/6-steps.json"
  LEFT=$((LIMIT - SECONDS))
  export LIMIT=$LEFT # bash counts the seconds of a new shell from 0
  SECONDS=0
  stage runs "$LEFT" bash -c runs
}
printf '\n%s' "$SUMMARY" | tee -a "$LOG"
exit $FAILED
