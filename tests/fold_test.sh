#!/usr/bin/env bash
# Usage: fold_test.sh BIN MODEL - kvc-fold as users run it: exit status, files, JSON.
set -euo pipefail
fold=$1/kvc-fold
model=$2
. "$(dirname "$0")/support/expect.sh"

expect 0 "$fold" --help
grep -q Usage "$dir/out"
expect 2 "$fold"
expect 2 "$fold" dance
for command in observe fold check unfold; do
    expect 0 "$fold" $command --help
    grep -q "kvc-fold $command" "$dir/out"
    expect 2 "$fold" $command
    expect 2 "$fold" $command --no-such-option
done

seq 60 | sed 's/.*/the king went out of the city & came to the sea; day &/' >"$dir/text.txt"
expect 0 "$fold" observe --model "$model" --file "$dir/text.txt" --tokens 256 --context 256 \
    --output "$dir/m.kvcal" --json
json "d['tokens'] == 256"

# run OPTIONS...: folds with them.
run()
{
    "$fold" fold --model "$model" --observation "$dir/m.kvcal" "$@"
}

# A dry run writes nothing.
expect 0 run --dry-run --json
grep -q 'nothing was written' "$dir/err"
json "'output' not in d and d['dry_run'] and d['architecture'] == 'llama' and d['type'] == 'state-rope-linear'"
json "len(d['attentions']) == 30 and d['factor'] == 1 and not d['power_of_two']"
json "0 < d['max_error'] < 1e-3 and 0 < d['change'] < 1e-2 and d['overflow'] == 0"

# There, and back to the same bytes; the input is as it was.
sum=$(sha256sum <"$model")
expect 0 run --output "$dir/p.gguf" --power-of-two --json
json "d['rounded'] == 0 and d['change'] == 0 and d['min_scale'] < 1 < d['max_scale']"
expect 0 "$fold" check --original "$model" --model "$dir/p.gguf" --max-change 0 --json
json "d['change'] == 0 and d['max_error'] == 0"
expect 0 "$fold" unfold --model "$dir/p.gguf" --output "$dir/u.gguf" --json
json "d['change'] == 0 and not d['dry_run'] and d['output']"
cmp "$model" "$dir/u.gguf"
expect 0 "$fold" unfold --model "$dir/p.gguf" --dry-run
grep -q 'nothing was written' "$dir/err"
grep -q 'change$' "$dir/out"
grep -q '^s: the scales' "$dir/out"
if grep ' $' "$dir/out"; then
    exit 1
fi
[ "$sum" = "$(sha256sum <"$model")" ]
rm "$dir/u.gguf"

# damage VALUE: a copy whose record has another scale of the first channel: d.gguf.
damage()
{
    python3 - "$dir/p.gguf" "$dir/d.gguf" "$1" <<'PY'
import struct, sys
data = bytearray(open(sys.argv[1], 'rb').read())
key = b'kvc.kvsmooth.scale.0'
at = data.index(key) + len(key) + 4 + 4 + 8
struct.pack_into('<f', data, at, float(sys.argv[3]) * struct.unpack_from('<f', data, at)[0])
open(sys.argv[2], 'wb').write(data)
PY
}

# A damaged record is refused before anything is written.
damage 8
expect 1 "$fold" unfold --model "$dir/d.gguf" --output "$dir/u.gguf"
grep -q 'scores change' "$dir/err"
damage nan
expect 1 "$fold" unfold --model "$dir/d.gguf" --output "$dir/u.gguf"
grep -q 'scale.0 has a nan' "$dir/err"
expect 1 "$fold" check --original "$model" --model "$dir/d.gguf"
rm "$dir/d.gguf"

# Refusals leave no file and no change.
expect 1 run --output "$dir/p.gguf"
grep -q -- --force "$dir/err"
ln "$dir/p.gguf" "$dir/same.gguf"
expect 1 "$fold" unfold --model "$dir/p.gguf" --output "$dir/same.gguf" --force
grep -q 'never changed' "$dir/err"
rm "$dir/same.gguf"
expect 1 "$fold" fold --model "$dir/p.gguf" --observation "$dir/m.kvcal" --output "$dir/n.gguf"
grep -q 'folded already' "$dir/err"
expect 1 "$fold" unfold --model "$model" --output "$dir/n.gguf"
grep -q 'not folded' "$dir/err"
expect 1 "$fold" check --original "$dir/p.gguf" --model "$model"
expect 1 "$fold" check --original "$model" --model "$model"
expect 1 "$fold" fold --model "$dir/text.txt" --observation "$dir/m.kvcal" --output "$dir/n.gguf"
grep -q 'neither a GGUF nor a safetensors file' "$dir/err"
expect 1 run --output "$dir/n.gguf" --observed-order file
grep -q 'observed-order is for safetensors files' "$dir/err"
expect 1 run --output "$dir/n.gguf" --model-config "$dir/text.txt"
grep -q 'model-config is for safetensors files' "$dir/err"
expect 1 "$fold" fold --model "$model" --observation "$dir/text.txt" --output "$dir/n.gguf"
expect 1 run --output "$dir/no/folder/n.gguf"
expect 2 run --output "$dir/n.gguf" --factor 0
expect 2 run --output "$dir/n.gguf" --rule most
# A disk that is full: files of this shell are limited to 1 MB.
expect 1 bash -c "trap '' XFSZ; ulimit -f 1024; \"\$@\"" - "$fold" fold --model "$model" \
    --observation "$dir/m.kvcal" --output "$dir/n.gguf"
grep -q 'cannot write' "$dir/err"
[ "$(ls "$dir")" = "$(printf '%s\n' err m.kvcal out p.gguf text.txt)" ]

# The article's settings; options win over them.
cat >"$dir/c.yaml" <<YAML
apiversion: modelslim_v1
metadata: {config_id: x}
spec:
  process:
    - type: "kv_smooth"
      smooth_factor: 0.5
      include: ["*"]
      exclude: ["model.layers.0.self_attn", "model.layers.{90,91}.self_attn"]
YAML
expect 0 run --config "$dir/c.yaml" --dry-run --json
grep -q 'ignored: metadata' "$dir/err"
grep -q 'no unit matches the pattern model.layers.{90,91}' "$dir/err"
json "d['factor'] == 0.5 and [a['name'] for a in d['attentions']][:2] == \
['model.layers.1.self_attn', 'model.layers.2.self_attn'] and len(d['attentions']) == 29"
expect 0 run --config "$dir/c.yaml" --factor 1.5 --include 'model.layers.{3,4}.*' --rule balance \
    --dry-run --json
grep -q 'above 1' "$dir/err"
json "d['factor'] == 1.5 and len(d['attentions']) == 2"
# Repeated patterns add up.
expect 0 run --include '*.3.*' --include '*.4.*' --include '*.[56].*' --exclude '*.4.*' \
    --exclude '*.5.*' --dry-run --json
json "[a['name'][13] for a in d['attentions']] == ['3', '6']"
echo 'spec: {process: [{type: kv_smooth, smoth_factor: 1}]}' >"$dir/c.yaml"
expect 1 run --config "$dir/c.yaml" --dry-run
grep -q smoth_factor "$dir/err"

# Other scales are told apart from those that the record has.
expect 0 run --output "$dir/f.gguf"
expect 0 "$fold" check --original "$model" --model "$dir/f.gguf" --json
json "0 < d['max_error'] < 1e-3"
# check prints what it has measured, and names each attention beyond the limit.
status=0
"$fold" check --original "$model" --model "$dir/f.gguf" --max-change 0 --json \
    >"$dir/out" 2>"$dir/err" || status=$?
[ $status = 1 ]
json "d['change'] > 0 and len(d['attentions']) == 30"
[ "$(grep -c 'scores change' "$dir/err")" = 30 ]
size=$(stat -c %s "$dir/f.gguf")
printf '\377' | dd of="$dir/f.gguf" bs=1 seek=$((size - 100)) conv=notrunc status=none
expect 1 "$fold" check --original "$model" --model "$dir/f.gguf"
grep -q differs "$dir/err"
