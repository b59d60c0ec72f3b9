#!/usr/bin/env bash
# run.sh - the first look: builds the engine, gets a small model and texts, observes its keys, lets it write
# on a 4-bit cache, and compares the presets. Under ten minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
. examples/script.sh

model=build/models/SmolLM2-135M-Instruct.Q4_1.gguf
text=build/models/text.txt
engine=build/release/bin/kvc-engine

step "packages"
need_packages gcc libc6-dev cmake ninja-build pkg-config libopenblas-dev libpcre2-dev \
    libpng-dev libjansson-dev libyaml-dev
step "model and texts"
examples/fetch_models.sh
step "build"
cmake --preset release -DKVC_TESTS=OFF >/dev/null
cmake --build --preset release --target kvc-engine kvc-bench kvc-plan kvc-photos
step "calibration: mean and scale of the keys, from text that is not scored below"
"$engine" calibrate --model "$model" --file build/models/calibration.txt
step "the model writes; all but the first 4 tokens and the open page of its cache are INT4"
"$engine" generate --model "$model" --kv int4 --recent 0 --tokens 200 --chat \
    --prompt "Why is the sky blue, and why is it red in the evening?"
step "the presets compared, and 4 bits without transforms: 2 chunks of 2048 tokens"
"$engine" compare --model "$model" --file "$text" --chunks 2 --context 2048 --recent 0 \
    --kv f16,int8,k6v4,int4,int4-raw,int4:plain
step "a small vision-language model answers 200 questions about pictures; its cache is pruned, coded and merged"
"$engine" exam --model examples/vlm/model.gguf --experiments first --questions 200
step "done; more to try"
cat >&2 <<EOF
$engine generate --model $model --chat --prompt "..."
$engine compare --model $model --file $text --chunks 10 --kv int4,int4:-mean,int4:online,int4:imm
$engine compare --model $model --file $text --chunks 1 --policy none,window:0.5,heavy:0.5
$engine vqa --model examples/vlm/model.gguf --picture 7 --kind screen --profile balanced
examples/vlm/run.sh                          # all experiments of docs/evaluation.md, with plots
build/release/bin/kvc-bench attend
examples/peers/attention.sh                  # the same attention beside ggml, the library of llama.cpp
examples/performance/run.sh                  # all tables of docs/performance.md
build/release/bin/kvc-photos --extract tests/data/photos.kvx
build/release/bin/kvc-plan --layers 32 --kv-heads 32 --head-dim 128 --budget 6GiB --at 12288
EOF
