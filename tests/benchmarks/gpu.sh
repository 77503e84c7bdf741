#!/usr/bin/env bash
# On a CUDA machine with SGLang: parity of real and random models against transformers, capture of each kind of model
# class, throughput, and a run under its supervisor.
# usage: gpu.sh PARITY|SPEED|SUPERVISED WORK [GGUF]    WORK: a folder on the disk to be measured; GGUF: the demo's model file
#        gpu.sh CAPTURE WORK [NAME ...]                NAME: a row of gpu_capture.py, all but qwen3-fa3 when there is none
# Prints tables; exits non-zero when a comparison fails.
set -uo pipefail
part=$1 work=$2 gguf=${3:-}
rest=("${@:3}")
here=$(cd "$(dirname "$0")/../.." && pwd)
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$here" HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore
export XDG_CACHE_HOME=$work/cache XDG_STATE_HOME=$work/state
mkdir -p "$work"
tapdeck() { python3 -m console.cli "$@"; }
failed=0

parity() { # name model-folder conversations backend dtype layers [further TOML]
  local name=$1 model=$2 data=$3 backend=$4 dtype=$5 layers=$6 more=${7:-}
  echo "== parity $name, $backend, $dtype"
  cat > "$work/$name.toml" <<T
model = { path = "$model", device = "cuda", dtype = "$dtype", attention_backend = "$backend" }
data = { files = ["$data"], max_len = 1500 }
taps = { layers = [$layers], final = true, normed = true }
output = { dir = "$work/$name", shard_bytes = 20000000 }
$more
T
  tapdeck extract "$work/$name.toml" && tapdeck verify "$work/$name" --sample 16 --against transformers || failed=1
}

if [ "$part" = PARITY ]; then
  python3 "$here/tests/benchmarks/gpu_models.py" "$work" || exit 1
  if [ -n "$gguf" ]; then
    mkdir -p "$work/smollm2"
    python3 -m extractor.commands.demo_convert "$gguf" "$work/smollm2" || exit 1
    for backend in triton fa3; do
      parity "smollm2-$backend" "$work/smollm2" "$work/conversations.jsonl" "$backend" bfloat16 "2, 14, 26"
    done
  fi
  parity qwen3 "$work/qwen3" "$work/letters.jsonl" triton bfloat16 "0, 2, 4"
  # Samples longer than a batch, in chunks that do not end where a kernel's tile does.
  for backend in triton fa3; do
    parity "qwen3-chunks-$backend" "$work/qwen3" "$work/letters.jsonl" "$backend" bfloat16 "0, 2, 4" \
      "batch = { max_tokens = 300, chunk_tokens = 117 }"
  done
  parity qwen3-moe "$work/qwen3-moe" "$work/letters.jsonl" triton bfloat16 "0, 2, 4"
elif [ "$part" = CAPTURE ]; then
  (cd "$here" && python3 -m tests.benchmarks.gpu_capture "$work" "${rest[@]}") || failed=1
elif [ "$part" = SUPERVISED ]; then
  [ -d "$work/qwen3" ] || python3 "$here/tests/benchmarks/gpu_models.py" "$work" || exit 1
  (cd "$here" && python3 -m tests.benchmarks.gpu_supervised "$work" triton) || failed=1
else
  python3 "$here/tests/benchmarks/throughput.py" --device cuda --shape qwen3-8b --backend fa3 --samples 576 \
    --max-tokens 8192 --rounds 3 --transformers 48 --dir "$work" || failed=1
fi
exit $failed
