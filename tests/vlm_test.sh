#!/usr/bin/env bash
# vlm_test.sh BIN_FOLDER MODEL: the commands vqa and exam of kvc-engine as a script sees them.
set -euo pipefail
. "$(dirname "$0")/support/expect.sh"

engine=$1/kvc-engine
model=$2

for command in vqa exam; do
    expect 0 "$engine" "$command" --help
    expect 2 "$engine" "$command"
    expect 2 "$engine" "$command" --model "$model" --nonsense
    expect 2 "$engine" "$command" --model "$model" --kernels best --picture 1
done
expect 2 "$engine" vqa --model "$model"
expect 2 "$engine" vqa --model "$model" --ask picture.png
expect 2 "$engine" vqa --model "$model" --picture 1 --ask picture.png "how many objects?"
expect 2 "$engine" vqa --model "$model" --picture 1 --profile strongest
expect 2 "$engine" vqa --model "$model" --picture 1 --profile light --rate 10
expect 1 "$engine" vqa --model "$dir/missing.gguf" --picture 1
expect 1 "$engine" vqa --model "$model" --ask "$dir/missing.png" "how many objects?"

# Most of what it is asked about pictures of its own it knows, on a compressed cache too.
for profile in none balanced; do
    expect 0 "$engine" vqa --model "$model" --picture 3 --kind screen --profile "$profile" --json
    json "len(d['answers']) >= 4 and all(a['rows_before'] == 576 for a in d['answers'])"
    json "sum(a['answer'] == a['right'] for a in d['answers']) >= len(d['answers']) / 2"
done
json "all(a['rows_after'] < 404 and a['bytes_after'] < a['bytes_before'] / 2 for a in d['answers'])"

# A picture from a file: the one that was drawn, so the answer is the same.
expect 0 "$engine" vqa --model "$model" --picture 3 --kind scene --overlay "$dir/scene.png" --json
question=$(json_value "d['answers'][0]['question']")
answer=$(json_value "d['answers'][0]['answer']")
expect 0 "$engine" vqa --model "$model" --ask "$dir/scene.png" "${question^^}" --json
json "d['question'] == '$question' and d['answer'] == '$answer' and 0 < d['likelihood'] <= 1"
expect 1 "$engine" vqa --model "$model" --ask "$dir/scene.png" "what is the meaning of it?"
expect 0 "$engine" vqa --model "$model" --ask "$dir/scene.png" "how many objects?" --profile extreme \
    --overlay "$dir/overlay.png"
cmp -s "$dir/scene.png" "$dir/overlay.png" && exit 1

expect 2 "$engine" exam --model "$model" --experiments first,nonsense
expect 2 "$engine" exam --model "$model" --questions 0
expect 1 "$engine" exam --model "$dir/missing.gguf"
expect 0 "$engine" exam --model "$model" --experiments first,second --questions 6 --csv "$dir/rows.csv" --json
json "[r['name'] for r in d['rows']] == ['f16', 'prune30', 'prune30+int8', 'prune30+int8+merge', 'light', \
'balanced', 'aggressive', 'extreme']"
json "all(set(r) == {'name', 'n', 'accuracy', 'cache_bytes_per_token', 'pool_bytes_per_token', \
'peak_cache_bytes', 'attention_us', 'step_ms'} and r['n'] == 6 and 0 <= r['accuracy'] <= 1 for r in d['rows'])"
json "d['rows'][0]['cache_bytes_per_token'] == 2560 and \
all(r['cache_bytes_per_token'] < 2560 for r in d['rows'][1:])"
[ "$(wc -l <"$dir/rows.csv")" = 10 ]

# Threads change no answer.
expect 0 "$engine" exam --model "$model" --experiments first --questions 5 --threads 1 --json
cp "$dir/out" "$dir/one"
expect 0 "$engine" exam --model "$model" --experiments first --questions 5 --threads 2 --json
cmp "$dir/one" "$dir/out"
