#!/usr/bin/env bash
# Everything worth knowing of a GPU machine in 8 minutes: what is there, the GPU tests, attention
# alone to 131,072 tokens, whole updates of GPT-2 small, a short race on equal tokens, and text from
# its result with and without a CUDA graph.
#
#   scripts/gpu_session.sh [--dry-run] [FOLDER]
#
# FOLDER (gpu_session) gets a log and a folder for each step and, at the end, results.tar.gz.
# --dry-run takes the same path on a CPU with tiny sizes. PYTHON names the interpreter.
# A step that fails or runs out of its time does not keep the others from running; the exit code is
# then 1, and summary.txt says which.
set -uo pipefail

tiny=false
if [[ "${1:-}" == --dry-run ]]; then
  tiny=true
  shift
fi
if [[ $# -gt 1 || "${1:-}" == -* ]]; then
  echo "usage: scripts/gpu_session.sh [--dry-run] [FOLDER]" >&2
  exit 2
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

if ! $tiny && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "error: torch finds no CUDA GPU here; --dry-run takes the same path on a CPU" >&2
  exit 2
fi

out=${1:-gpu_session}
mkdir -p "$out" && out=$(cd "$out" && pwd) && cd "$root" || exit 2

# seconds of each step, 480 in all; a benchmark stops by itself a little before
environment_s=15 tests_s=90 decode_s=35 attention_s=105 updates_s=95 engine_s=40 race_s=70
text_s=15
graphs=(false true)
mechanisms=[slay,slay_best,slay_block_quadratic,linear_elu,performer,cosformer,softmax,yat_spherical]
attention=(mechanisms="$mechanisms" dtype=bf16 passes=[forward,forward_backward]
  longest_call_s=1 rounds=5)
decode=(dtype=fp32 passes=[decode] mechanisms=[slay,slay_best,softmax] rounds=5)
updates=(lengths=[1024,4096] rounds=5)
engine=(lengths=[1024] rounds=5)
race=(experiment=cpu_race jobs=3 budget.updates=300 engine.precision=bf16)
if $tiny; then
  export CUDA_VISIBLE_DEVICES=
  environment_s=120 tests_s=600 decode_s=600 attention_s=600 updates_s=600 engine_s=600
  race_s=900 text_s=120
  graphs=(false)
  small=(mechanisms=[slay,softmax] heads=2 head_dim=8 rounds=1)
  attention=("${small[@]}" peers=[torch_sdpa,fla_slay] lengths=[64] passes=[forward])
  decode=("${small[@]}" peers=[torch_sdpa] contexts=[8,16] passes=[decode])
  model=(model=gpt2_mini model.layers=1 model.width=32 model.heads=2 tokenizer=bytes tokens=16)
  updates=(lengths=[8] rounds=1 "${model[@]}")
  engine=("${updates[@]}")
  race=(experiment=cpu_race tokenizer=bytes tokenizer.vocabulary_size=null data=text
    "data.source.path=$root/docs" data.validation_fraction=0.4 "data.cache_directory=$out/data"
    model.layers=1 model.width=32 model.heads=2 model.context_length=32 budget.updates=2
    schedule.warmup_updates=1 validation.tokens=64)
fi
cut() { echo $(($1 > 20 ? $1 - 10 : $1)); }

failed=()
step() { # step NAME SECONDS COMMAND...
  local name=$1 seconds=$2 start=$SECONDS code
  shift 2
  echo "== $name (at most $seconds s)"
  timeout --signal=INT --kill-after=10 "$seconds" "$@" >"$out/$name.log" 2>&1
  code=$?
  tail -n 25 "$out/$name.log"
  echo "$name: exit code $code, $((SECONDS - start)) s" | tee -a "$out/summary.txt"
  [[ $code == 0 ]] || failed+=("$name")
}

: >"$out/summary.txt"
step environment "$environment_s" "$python" -m slayformer.benchmark.machine
# exit code 5: no test is marked, or left after skipping
step tests "$tests_s" bash -c '"$@"; code=$?; exit $((code == 5 ? 0 : code))' tests \
  "$python" -m pytest -q -m gpu -p no:cacheprovider tests
step decode "$decode_s" "$python" scripts/bench_attention.py directory="$out/decode" \
  "${decode[@]}" time_budget_s="$(cut "$decode_s")"
step attention "$attention_s" "$python" scripts/bench_attention.py directory="$out/attention" \
  time_budget_s="$(cut "$attention_s")" "${attention[@]}"
step updates "$updates_s" "$python" scripts/bench_train.py directory="$out/updates" \
  time_budget_s="$(cut "$updates_s")" attention=[softmax,slay,slay_best] "${updates[@]}"
step engine "$engine_s" "$python" scripts/bench_train.py directory="$out/engine" \
  attention=[softmax] loops=[plain,zero1] "${engine[@]}"
step race "$race_s" "$python" scripts/compare.py directory="$out/race" \
  attention=[softmax,slay,slay_best] seeds=[1] "${race[@]}"
for graph in "${graphs[@]}"; do
  step "text_cuda_graph_$graph" "$text_s" "$python" scripts/generate.py tokens=200 \
    checkpoint="$out/race/slay-seed1" prompt="We the people" temperature=0 cuda_graph="$graph"
done

# made elsewhere: a folder must not change while it is read
archive=$(mktemp)
if tar -C "$out" --exclude=./results.tar.gz --exclude=checkpoints --exclude=./data -czf \
  "$archive" .; then
  mv "$archive" "$out/results.tar.gz"
else
  failed+=(archive)
fi
echo "$out/results.tar.gz"
if ((${#failed[@]})); then
  echo "did not finish: ${failed[*]}" | tee -a "$out/summary.txt"
  exit 1
fi
