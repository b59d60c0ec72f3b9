#!/usr/bin/env bash
# Usage: bench_test.sh BIN - kvc-bench as a script sees it: exit status, and one JSON object on standard
# output and nothing else.
set -euo pipefail
bench=$1/kvc-bench
. "$(dirname "$0")/support/expect.sh"

expect 0 "$bench" --help
grep -q Usage "$dir/out"
expect 2 "$bench"
expect 2 "$bench" dance
for command in attend prefill append rows compress peer; do
    expect 0 "$bench" "$command" --help
    expect 2 "$bench" "$command" --no-such-option
done

expect 2 "$bench" attend --formats int5
expect 2 "$bench" attend --keep 0
expect 2 "$bench" attend --scores row
small="--n-kv 256 --threads 1 --head-dim 32 --seconds 0 --tables ref"
# shellcheck disable=SC2086
expect 0 "$bench" attend $small --heads 4/2 --formats f16,int8,int4,k6v4,k8v4,int4-raw --json
json "d['read_gbps'] > 0 and [r['format'] for r in d['rows']] == ['f16', 'int8', 'int4', 'k6v4', \
'k8v4', 'int4-raw']"
json "all(set(r) == {'table', 'format', 'n_kv', 'heads', 'kv_heads', 'head_dim', 'threads', 'exact', 'scores', \
'state', 'keep', 'block', 'us', 'bytes', 'gbps', 'read_share', 'gflops', 'fma_share', 'vnni_share', \
'append_us', 'append_share'} for r in d['rows'])"
json "all(r['us'] > 0 and r['append_us'] > 0 and 0 < r['read_share'] and 0 < r['fma_share'] \
for r in d['rows'])"
json "d['machine'][0]['threads'] == 1 and all(set(m) == {'threads', 'read_gbps', 'read_small_gbps', \
'read_huge_gbps', 'read_prefetch_gbps', 'copy_gbps', 'fma_gflops', 'vnni_gops'} and m['read_gbps'] == \
max(m['read_small_gbps'], m['read_huge_gbps'], m['read_prefetch_gbps']) and m['copy_gbps'] > 0 and \
m['fma_gflops'] > 0 for m in d['machine'])"
json "d['rows'][0]['bytes'] == 256 * 2 * 32 * 2 * 2"
# Half of the rows gone, as holes and moved together: whole pages leave no holes.
# shellcheck disable=SC2086
expect 0 "$bench" attend $small --heads 4/2 --formats int8 --keep 0.5 --block 1,64 --scores none,token --json
json "[(r['scores'], r['state'], r['block']) for r in d['rows']] == [(s, t, b) for s in ('none', 'token') \
for t, b in (('whole', 0), ('holes', 1), ('compacted', 1), ('holes', 64), ('compacted', 64))]"
json "[r['bytes'] == d['rows'][0]['bytes'] for r in d['rows']] == 2 * [True, True, False, False, False]"
json "all((r['append_us'] is None) == (r['state'] != 'whole') for r in d['rows'])"
# shellcheck disable=SC2086
expect 0 "$bench" attend $small --heads 4/2 --formats int8 --keep 0.5 --transforms --small-pages --exact
grep -q 'Products: of floats' "$dir/out"

expect 2 "$bench" prefill --rows 0
expect 2 "$bench" prefill --rows 64 --n-kv 63
# shellcheck disable=SC2086
expect 0 "$bench" prefill $small --heads 4/2 --rows 1,64 --json
json "[(r['format'], r['rows']) for r in d['rows']] == [(f, n) for f in ('f16', 'int8', 'int4') \
for n in (1, 64)] and len(d['machine']) > 0"
json "all(set(r) == {'table', 'format', 'rows', 'n_kv', 'heads', 'kv_heads', 'head_dim', 'threads', 'us', \
'bytes', 'gflops', 'fma_share'} for r in d['rows'])"
json "all(abs(r['gflops'] * r['us'] * 1000 / (4 * 32 * 4 * p) - 1) < 0.1 for r in d['rows'] \
for p in [r['rows'] * 256 - r['rows'] * (r['rows'] - 1) / 2])"
# shellcheck disable=SC2086
expect 0 "$bench" prefill $small --heads 4/2 --rows 16

expect 2 "$bench" append --heads 4/3
# shellcheck disable=SC2086
expect 0 "$bench" append $small --heads 4/2 --formats f16,int4 --json
json "[(r['format'], r['transforms']) for r in d['rows']] == [(f, t) for f in ('f16', 'int4') \
for t in (False, True)] and len(d['machine']) > 0"
json "all(set(r) == {'table', 'format', 'transforms', 'n_kv', 'heads', 'kv_heads', 'head_dim', 'threads', \
'append_us', 'seal_us', 'seal_gbps', 'copy_share', 'attend_us', 'attend_share'} for r in d['rows'])"
json "all(v > 0 for r in d['rows'] for k, v in r.items() if k[-3:] == '_us' or k[-6:] == '_share')"
# shellcheck disable=SC2086
expect 0 "$bench" append $small --heads 4/2 --formats int8 --transforms

expect 2 "$bench" rows --formats int8
expect 2 "$bench" rows --head-dim 40
# shellcheck disable=SC2086
expect 0 "$bench" rows $small --heads 4/2 --json
json "[r['format'] for r in d['rows']] == ['f16', 'q8_0', 'q4_0'] and len(d['machine']) > 0"
json "all(set(r) == {'table', 'exact', 'format', 'n_kv', 'heads', 'kv_heads', 'head_dim', 'threads', 'us', 'bytes', \
'gbps', 'read_share'} for r in d['rows'])"
json "[r['bytes'] for r in d['rows']] == [256 * 2 * 2 * n for n in (64, 34, 18)]"
json "all(abs(r['gbps'] * r['us'] * 1000 / r['bytes'] - 1) < 0.01 and not r['exact'] for r in d['rows'])"
# shellcheck disable=SC2086
expect 0 "$bench" rows $small --heads 4/2 --head-dim 40 --formats f16 --exact --small-pages
grep -q 'of read' "$dir/out"

# Where CMake found ggml both sides run and agree; elsewhere the program says how to get it.
expect 2 "$bench" peer --kv-heads 5
expect 2 "$bench" peer --formats k6v4
expect 2 "$bench" peer --head-dim 40
expect 2 "$bench" peer --layouts row
# shellcheck disable=SC2086
if "$bench" peer $small --heads 4 --kv-heads 2 --json >"$dir/out" 2>"$dir/err"; then
    json "[(r['format'], r['layout']) for r in d['rows']] == [(f, l) for f in ('f16', 'int8', 'int4') \
for l in ('token-major', 'head-major')]"
    json "all(set(r) == {'format', 'layout', 'heads', 'kv_heads', 'head_dim', 'n_kv', 'threads', 'table', \
'ours_us', 'ggml_us', 'ratio', 'ratio_low', 'ratio_high', 'pairs', 'difference'} for r in d['rows'])"
    json "all(r['ratio_low'] <= r['ratio'] <= r['ratio_high'] and r['difference'] < 0.05 for r in d['rows'])"
else
    # shellcheck disable=SC2086
    expect 1 "$bench" peer $small --heads 4 --kv-heads 2 --json
    grep -q examples/peers/attention.sh "$dir/err"
    [ ! -s "$dir/out" ]
fi

expect 2 "$bench" compress --kernels best
expect 2 "$bench" compress --repeat 0
expect 2 "$bench" compress --heads 4 --kv-heads 3
expect 2 "$bench" compress --layers 512 --tokens 8192
expect 0 "$bench" compress --layers 2 --heads 4 --kv-heads 2 --head-dim 32 --tokens 64 --window 2 \
    --repeat 2 --kernels ref
expect 0 "$bench" compress --layers 2 --heads 4 --kv-heads 2 --head-dim 32 --tokens 64 --window 2 \
    --repeat 2 --kernels ref --json
json "set(d) == {'kernels', 'layers', 'heads', 'kv_heads', 'head_dim', 'tokens', 'window', 'repeat', \
'rows'} and d['kernels'] == 'ref' and d['tokens'] == 64 and d['repeat'] == 2"
json "[r['step'] for r in d['rows']] == ['prune', 'prune+merge', 'prune+merge window', 'score', \
'cache seal', 'cache prune', 'cache prune+merge', 'cache score+prune+merge', \
'cache score+prune+merge+report']"
json "all(set(r) == {'step', 'tokens_left', 'ms', 'min_ms', 'max_ms', 'cpu_ms', 'parts'} and \
0 < r['min_ms'] <= r['ms'] <= r['max_ms'] for r in d['rows'])"
json "all(set(p) == {'part', 'ms', 'min_ms', 'max_ms'} and 0 <= p['min_ms'] <= p['max_ms'] \
for r in d['rows'] for p in r['parts'])"
json "[len(r['parts']) for r in d['rows']] == [3, 6, 6, 2, 1, 1, 1, 1, 1]"
json "[r['tokens_left'] for r in d['rows']] == [45, 34, 34, 64, 64, 45, 34, 34, 34]"
