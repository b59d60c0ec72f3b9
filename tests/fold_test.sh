#!/usr/bin/env bash
# Usage: fold_test.sh KVC-FOLD MODEL - kvc-fold as a script sees it, on a real model: exit status, one JSON
# object on standard output, and what it leaves on the disk.
set -euo pipefail
fold=$1
model=$2
. "$(dirname "$0")/support/expect.sh"

seq 60 | sed 's/.*/the king went out of the city & came to the sea; day/' >"$dir/text.txt"

expect 0 "$fold" --help
grep -q Usage "$dir/out"
expect 2 "$fold"
expect 2 "$fold" dance
for command in observe fold check unfold; do
    expect 0 "$fold" "$command" --help
    expect 2 "$fold" "$command" --no-such-option
    expect 2 "$fold" "$command"
done

expect 0 "$fold" observe --model "$model" --file "$dir/text.txt" --output "$dir/m.kvcal" --tokens 200 --json
json "d['tokens'] == 200"

# Nothing is written by a trial, over the model, over a file that is there, or after a failure.
expect 0 "$fold" fold --model "$model" --observation "$dir/m.kvcal" --dry-run --json
json "d['command'] == 'fold' and len(d['attentions']) == 30 and d['factor'] == 1 and d['rounded'] > 0"
json "0 < d['min_scale'] < 1 < d['max_scale'] and 0 < d['change'] < 0.01 and d['max_error'] < 0.01"
expect 1 "$fold" fold --model "$model" --observation "$dir/text.txt" --output "$dir/a.gguf"
expect 1 "$fold" fold --model "$dir/text.txt" --observation "$dir/m.kvcal" --output "$dir/a.gguf"
expect 1 "$fold" fold --model "$model" --observation "$dir/m.kvcal" --output "$model"
[ ! -e "$dir/a.gguf" ]

# Powers of two: a fold that is taken out again leaves the file as it was.
expect 0 "$fold" fold --model "$model" --observation "$dir/m.kvcal" --output "$dir/a.gguf" --power-of-two --json
json "d['power_of_two'] and d['change'] == d['rounded'] == d['max_error'] == 0 and d['max_scale'] > 1"
expect 1 "$fold" fold --model "$model" --observation "$dir/m.kvcal" --output "$dir/a.gguf" --power-of-two
expect 0 "$fold" check --original "$model" --model "$dir/a.gguf" --json
expect 1 "$fold" fold --model "$dir/a.gguf" --observation "$dir/m.kvcal" --output "$dir/b.gguf" # twice
grep -qi 'already' "$dir/err"
expect 1 "$fold" unfold --model "$model" --output "$dir/b.gguf" # never
expect 0 "$fold" unfold --model "$dir/a.gguf" --output "$dir/b.gguf"
cmp "$dir/b.gguf" "$model"
rm "$dir/b.gguf"

# Settings from YAML, as in article 003; options win.
cat >"$dir/smooth.yaml" <<YAML
apiversion: modelslim_v1
spec:
  process:
    - type: kv_smooth
      smooth_factor: 0.5
      include: ["*"]
      exclude: ["model.layers.{0,1}.self_attn"]
YAML
expect 0 "$fold" fold --model "$model" --observation "$dir/m.kvcal" --output "$dir/c.gguf" \
    --config "$dir/smooth.yaml" --json
json "d['factor'] == 0.5 and len(d['attentions']) == 28 and '.2.' in d['attentions'][0]['name']"
expect 0 "$fold" check --original "$model" --model "$dir/c.gguf" --json
expect 1 "$fold" check --original "$dir/a.gguf" --model "$dir/c.gguf"
[ "$(find "$dir" -name '*.gguf*' | wc -l)" = 2 ] # no part is left behind
