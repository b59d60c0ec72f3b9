#!/usr/bin/env bash
# Usage: programs_test.sh BIN MODEL - the programs as a script sees them: exit status, and one JSON object
# on standard output and nothing else.
set -euo pipefail
engine=$1/kvc-engine
plan=$1/kvc-plan
model=$2
. "$(dirname "$0")/support/expect.sh"

seq 200 | sed 's/.*/the king went out of the city & came to the sea; day/' >"$dir/text.txt"

for program in "$engine" "$plan"; do
    expect 0 "$program" --help
    grep -q Usage "$dir/out"
    expect 2 "$program"
    expect 2 "$program" dance
done
for command in "$engine generate" "$engine compare" "$engine long"; do
    # shellcheck disable=SC2086
    expect 0 $command --help
    # shellcheck disable=SC2086
    expect 2 $command --no-such-option
done
expect 1 "$engine" generate --model "$dir/none.gguf" --prompt x
expect 1 "$engine" generate --model "$dir/text.txt" --prompt x
expect 1 "$engine" compare --model "$model" --file "$dir/none.txt"

expect 0 "$engine" generate --model "$model" --prompt 'Say "héllo" 😀' --kv int4 --tokens 12 --json
json "d['tokens'] == 12 and d['prompt_tokens'] > 3 and len(d['text']) > 0 and d['kv'] == 'int4'"
json "d['decode_tok_s'] > 0 and d['prompt_tok_s'] > 0 and d['bytes_per_token'] > 0"

expect 0 "$engine" tokens --model "$model" --file "$dir/text.txt" --limit 5 --json
json "len(d['tokens']) == 5 and all(t >= 0 for t in d['tokens'])"

expect 1 "$engine" calibrate --model "$model" --file "$dir/none.txt" --output "$dir/m.kvcal"
[ ! -e "$dir/m.kvcal" ]
expect 0 "$engine" calibrate --model "$model" --file "$dir/text.txt" --output "$dir/m.kvcal" \
    --tokens 300 --context 256 --json
json "d['tokens'] == 300 and d['output'].endswith('m.kvcal') and d['text'] == 'text.txt'"
expect 1 "$engine" compare --model "$model" --file "$dir/text.txt" --calibration "$dir/text.txt"
# Inputs are never overwritten, under whatever name, and files are not found out to be out of reach
# at the end.
cp "$dir/text.txt" "$dir/copy.txt"
ln "$dir/text.txt" "$dir/link.txt"
expect 1 "$engine" calibrate --model "$model" --file "$dir/text.txt" --output "$dir/link.txt" --tokens 64
for csv in "$dir/link.txt" "$dir/none/rows.csv" "$dir"; do
    expect 1 "$engine" compare --model "$model" --file "$dir/text.txt" --context 64 --csv "$csv"
    expect 1 "$engine" sensitivity --model "$model" --file "$dir/text.txt" --csv "$csv"
    [ ! -s "$dir/out" ]
done
cmp "$dir/text.txt" "$dir/copy.txt"
expect 2 "$engine" calibrate --model "$model" --file "$dir/text.txt" --output "$dir/m.kvcal" --tokens 4
expect 2 "$engine" calibrate --model "$model" --file "$dir/text.txt" --output "$dir/m.kvcal" \
    --context 8 --sinks 8
expect 2 "$engine" generate --model "$model" --prompt x --kv int4:imm
expect 2 "$engine" generate --model "$model" --prompt x --kv int8:global
expect 2 "$engine" compare --model "$model" --file "$dir/text.txt" --kv int4:-nothing

expect 0 "$engine" compare --model "$model" --file "$dir/text.txt" --context 256 --chunks 1 \
    --recent 0 --calibration "$dir/m.kvcal" --bucket 64 --csv "$dir/rows.csv" \
    --kv int8,int4,int4:plain,int4:imm,int4:perhead,int4:online,int4:imm:s0 --json
json "[r['kv'] for r in d['rows']] == ['f16', 'int8', 'int4', 'int4:plain', 'int4:imm', \
'int4:perhead', 'int4:online', 'int4:imm:s0']"
json "[r['vectors'] for r in d['rows']] == ['none', 'file', 'file', 'none', 'file', 'none', 'online', 'file']"
json "d['context'] == 256 and d['tokens'] == 256 and d['model'].endswith('.gguf')"
json "d['calibration'] == 'm.kvcal' and d['text'] == 'text.txt'"
json "all(set(r) == {'kv', 'policy', 'vectors', 'ppl', 'ppl_change_pct', 'kl', 'top1', \
'bits_per_element', 'coded', 'bytes_per_token', 'fixed_bytes', 'decode_tok_s', 'buckets'} \
for r in d['rows'])"
json "[r['coded'] for r in d['rows']] == [True] * 6 + [False, True]" # online: four pages at least
json "all(math.isfinite(v) for r in d['rows'] for v in r.values() if isinstance(v, (int, float)))"
json "d['rows'][0]['kl'] == 0 and 0 < d['rows'][1]['kl'] < d['rows'][2]['kl'] < d['rows'][4]['kl'] < \
d['rows'][5]['kl']"
json "d['rows'][7]['kl'] > 1.2 * d['rows'][4]['kl']" # the sinks are coded too
json "[r['bits_per_element'] for r in d['rows'][:3]] == [16, 8.25, 4.25]"
json "d['rows'][0]['bytes_per_token'] > d['rows'][1]['bytes_per_token'] > \
d['rows'][2]['bytes_per_token']"
json "[b['to'] for b in d['rows'][2]['buckets']] == [192, 256]"
json "abs(sum(b['kl'] * b['n'] for b in d['rows'][2]['buckets']) / \
sum(b['n'] for b in d['rows'][2]['buckets']) - d['rows'][2]['kl']) < 1e-9"
# In the CSV, two buckets and their sum for each of eight rows: the numbers of the JSON.
python3 - "$dir/out" "$dir/rows.csv" <<'EOF'
import csv, json, sys
d = json.load(open(sys.argv[1], encoding='utf-8'))
lines = list(csv.DictReader(open(sys.argv[2], encoding='utf-8')))
assert len(lines) == 24
for i, r in enumerate(d['rows']):
    *buckets, total = lines[3 * i:3 * i + 3]
    assert all(l['kv'] == r['kv'] and l['vectors'] == r['vectors'] for l in lines[3 * i:3 * i + 3])
    assert [(int(l['to']), int(l['n'])) for l in buckets] == [(b['to'], b['n']) for b in r['buckets']]
    assert int(total['n']) == sum(int(l['n']) for l in buckets) == 127
    for name in 'ppl', 'kl', 'top1':
        assert abs(float(total[name]) - r[name]) <= 1e-8 * abs(r[name])
EOF
# Steps that are dropped: from a calibration only; measured online, the mean would still be there.
expect 1 "$engine" compare --model "$model" --file "$dir/text.txt" --context 256 --chunks 1 \
    --calibration none --kv int4:-mean
expect 1 "$engine" sensitivity --model "$model" --file "$dir/text.txt" --tokens 128 --context 128 \
    --chunks 1 --calibration none

expect 2 "$engine" compare --model "$model" --file "$dir/text.txt" --policy heavy:2
expect 2 "$engine" compare --model "$model" --file "$dir/text.txt" --tune --policy window
expect 0 "$engine" compare --model "$model" --file "$dir/text.txt" --context 512 --chunks 1 \
    --recent 64 --calibration none --policy none,window:0.25,heavy:0.25,balanced,extreme --json
json "[(r['kv'], r['policy']) for r in d['rows']] == [('f16', 'none'), ('f16', 'window:0.25'), \
('f16', 'heavy:0.25'), ('int8:plain', 'balanced'), ('int4:plain', 'extreme')]"
json "all(r['kl'] > 0 for r in d['rows'][1:])"
json "all(0.2 < r['bytes_per_token'] / d['rows'][0]['bytes_per_token'] < 0.45 \
for r in d['rows'][1:3])"
json "d['rows'][3]['bits_per_element'] == 8.25 and 4.25 < d['rows'][4]['bits_per_element'] < 8"

expect 0 "$engine" compare --model "$model" --file "$dir/text.txt" --context 256 --chunks 1 \
    --tune --tune-limit 0.001 --json
json "set(d) == {'model', 'context', 'tokens', 'limit', 'rate', 'rows'} and d['limit'] == 0.001"
json "all(set(r) == {'rate', 'kv', 'ppl', 'ppl_change_pct', 'kl', 'top1', 'bytes_per_token'} \
for r in d['rows'])"
json "[round(10 * r['rate']) for r in d['rows']] == [0, 2, 3, 4, 5, 6, 7, 8][:len(d['rows'])]"
json "d['rate'] == max(r['rate'] for r in d['rows'] if r['kl'] <= d['limit'])"
json "all(r['kl'] <= d['limit'] for r in d['rows'][:-1]) and d['rows'][-1]['kl'] > d['limit']"

expect 2 "$engine" long --model "$model" --file "$dir/text.txt" --contexts 300 --bucket 256
expect 1 "$engine" long --model "$model" --file "$dir/text.txt"
expect 0 "$engine" long --model "$model" --file "$dir/text.txt" --contexts 128,384 --bucket 128 \
    --rope none,yarn --rope-factor 4 --kv int8 --json
json "d['model'].endswith('.gguf') and d['kv'] == 'int8' and d['tokens'] == 384"
json "all(set(r) == {'rope', 'factor', 'context', 'bucket_start', 'bucket_end', 'ppl'} \
for r in d['rows'])"
json "[(r['rope'], r['factor'], r['context'], r['bucket_start']) for r in d['rows']] == \
[('none', 1, 128, 0), ('yarn', 4, 128, 0)] + \
[(n, f, 384, at) for n, f in (('none', 1), ('yarn', 4)) for at in (0, 128, 256)]"
json "all(r['bucket_end'] == r['bucket_start'] + 128 and 1 < r['ppl'] < 1e5 for r in d['rows'])"
json "d['rows'][0]['ppl'] == d['rows'][2]['ppl'] != d['rows'][5]['ppl']"
# A token counts where it stands: 63 of the first 64 and 64 of the next follow another.
whole=$(json_value "d['rows'][0]['ppl']")
expect 0 "$engine" long --model "$model" --file "$dir/text.txt" --contexts 128 --bucket 64 \
    --rope none --kv int8 --json
json "abs(63 * math.log(d['rows'][0]['ppl']) + 64 * math.log(d['rows'][1]['ppl']) - \
127 * math.log($whole)) < 0.05"

expect 1 "$engine" compare --model "$model" --file "$dir/text.txt" --context 9000
grep -q -- --rope "$dir/err"
expect 0 "$engine" generate --model "$model" --prompt x --tokens 2 --rope ntk --rope-factor 1.5 --json

seven="--layers 32 --kv-heads 32 --head-dim 128"
# shellcheck disable=SC2086
expect 0 "$plan" $seven --budget 6GiB --json
json "d['budget_bytes'] == 6 << 30 and [r['profile'] for r in d['rows']] == \
['f16', 'int8', 'int4', 'k6v4', 'int4-raw', 'light', 'balanced', 'aggressive', 'extreme']"
json "all(set(r) == {'profile', 'bytes_per_token', 'tokens', 'cache_bytes'} for r in d['rows'])"
json "d['rows'][0]['bytes_per_token'] == 524288 and d['rows'][0]['tokens'] == 12288"
json "[r['tokens'] for r in d['rows']] == [12288, 24197, 46260, 37449, 44938, 14456, 46091, 105916, 201746]"
# shellcheck disable=SC2086
expect 0 "$plan" $seven --memory 16GiB --params 7e9 --weight-bits 4 --overhead 1GiB --json
json "d['budget_bytes'] == (15 << 30) - 3500000000"
expect 0 "$plan" --model "$model" --budget 1.5GB --visual-share 0 --json
json "d['budget_bytes'] == 1500000000 and d['rows'][0]['bytes_per_token'] == 30 * 3 * 64 * 2 * 2"
json "d['rows'][5] == {**d['rows'][0], 'profile': 'light'}"
expect 0 "$plan" --model "$model" --memory 1GiB --json
json "9e8 < d['budget_bytes'] < 1e9"
expect 1 "$plan" --model "$dir/text.txt" --budget 1GiB
for size in '' 6G 1.5 -1 0x10 1e9 18446744073709551616 16777216TiB; do
    # shellcheck disable=SC2086
    expect 2 "$plan" $seven --budget "$size"
done
# shellcheck disable=SC2086
for wrong in '' '--budget 1 --memory 1' '--budget 1 --params 1' '--memory 1' '--budget 1 --heads 33' \
    '--budget 1 --visual-share 1.1' '--budget 1 --at 0' '--budget 1 --model x'; do
    expect 2 "$plan" $seven $wrong
done

# The bytes of one head, multiplied, are those of a cache whose layers and heads are all filled.
shape="--layers 3 --kv-heads 2 --head-dim 64 --budget 1GiB --at 1500 --visual-share 0.8 --json"
# shellcheck disable=SC2086
expect 0 "$plan" $shape
json "all(r['cache_bytes'] > 1500 * r['bytes_per_token'] / 2 for r in d['rows'])"
cp "$dir/out" "$dir/one"
# shellcheck disable=SC2086
expect 0 "$plan" $shape --fill
cmp "$dir/one" "$dir/out"
