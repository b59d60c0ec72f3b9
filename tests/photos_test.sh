#!/usr/bin/env bash
# Usage: photos_test.sh KVC_PHOTOS EXTRACT - pruning and merging on recorded attention: photos astronaut and
# chelsea, layers 4 and 9 of a vision transformer, heads 0 and 1.
set -euo pipefail
photos=$1
extract=$2
. "$(dirname "$0")/support/expect.sh"

# json EXPRESSION: the output is one object d, with its rows r, for which the Python expression holds.
json()
{
    python3 -c "
import json, math, sys
d = json.load(open(sys.argv[1], encoding='utf-8'))
r = d['rows']
def mean(kept, method, kind):
    rows = [x[method][kind] for x in r if x['kept'] == kept]
    return sum(rows) / len(rows)
assert $1, d" "$dir/out"
}

# alter OFFSET BYTES: a copy of the extract with some bytes changed (printf's escapes).
alter()
{
    cp "$extract" "$dir/bad.kvx"
    # shellcheck disable=SC2059
    printf "$2" | dd of="$dir/bad.kvx" bs=1 seek="$1" conv=notrunc status=none
}

expect 0 "$photos" --help
grep -q Usage "$dir/out"
expect 2 "$photos"
expect 2 "$photos" --dance
expect 1 "$photos" --extract "$dir/none.kvx"

# The tokens kept are those of three rounds that each merge a quarter.
expect 0 "$photos" --extract "$extract" --json
json "[x['kept'] for x in r] == [192, 144, 108] * 4 and r[2]['share'] == 0.421875"
json "[(x['photo'], x['layer']) for x in r[::3]] == \
[(p, l) for p in ('astronaut', 'chelsea') for l in (4, 9)]"

# Everywhere: the bias helps, and pruning is what fails when the question changes.
claims="all(x['merge_bias'][k] < 0.9 * x['merge'][k] for x in r for k in ('same', 'shifted')) and \
d['bias_wins'] == d['comparisons'] == 2 * len(r)"
json "$claims"
json "all(x['prune']['shifted'] > 2 * x['merge_bias']['shifted'] for x in r)"

# The error told beforehand, from 16 queries, against that of 32 others.
json "d['within_2x'] == {'prune': 12, 'merge': 12, 'merge_bias': 12} and d['cases'] == 12"

# Means over the rows, as a program in another language computed them in double precision.
near()
{
    json "all(math.isclose(mean(k, m, q), v, rel_tol=2e-3) for k, m, q, v in [$1])"
}
near "(192, 'prune', 'same', .02409), (192, 'prune', 'shifted', .28267),
    (192, 'merge', 'same', .15338), (192, 'merge', 'shifted', .15565),
    (192, 'merge_bias', 'same', .05489), (192, 'merge_bias', 'shifted', .06199),
    (144, 'merge_bias', 'shifted', .13239), (108, 'prune', 'reported', .13760),
    (108, 'merge_bias', 'same', .18695), (108, 'merge_bias', 'reported', .18978)"
expect 0 "$photos" --extract "$extract" --shared --json
json "$claims"
near "(192, 'prune', 'same', .03223), (192, 'merge', 'shifted', .16145),
    (192, 'merge_bias', 'same', .07256), (144, 'merge_bias', 'reported', .12938),
    (108, 'prune', 'shifted', .90938), (108, 'prune', 'reported', .17046),
    (108, 'merge_bias', 'shifted', .19490)"

expect 0 "$photos" --extract "$extract" --per-head --json
json "[x['head'] for x in r[::3]] == [0, 1] * 4"
expect 0 "$photos" --extract "$extract" --plot "$dir/plot.gp"
grep -q '^astronaut  *75 %' "$dir/out"
grep -q '^set terminal svg' "$dir/plot.gp"
expect 1 "$photos" --extract "$extract" --plot "$dir/none/plot.gp"

# Damaged extracts.
size=$(wc -c <"$extract")
for n in 0 43 44 71 $((size - 1)); do
    head -c "$n" "$extract" >"$dir/bad.kvx"
    expect 1 "$photos" --extract "$dir/bad.kvx"
done
{ cat "$extract"; echo; } >"$dir/bad.kvx"
expect 1 "$photos" --extract "$dir/bad.kvx"
alter 0 'X' && expect 1 "$photos" --extract "$dir/bad.kvx"
alter 4 '\2' && expect 1 "$photos" --extract "$dir/bad.kvx"
for field in 8 12 16 20 24 28 32 36 40; do # the counts
    for bytes in '\0\0\0\0' '\377\377\377\377' '\0\0\1\0' '\7'; do
        alter "$field" "$bytes"
        cmp -s "$extract" "$dir/bad.kvx" || expect 1 "$photos" --extract "$dir/bad.kvx"
    done
done
alter 44 '"' && expect 1 "$photos" --extract "$dir/bad.kvx"
alter 44 '\0' && expect 1 "$photos" --extract "$dir/bad.kvx"
alter 44 'aaaaaaaaaaaaaaaaaaaaaaaa' && expect 1 "$photos" --extract "$dir/bad.kvx"
alter 68 '\377\377\377\377' && expect 1 "$photos" --extract "$dir/bad.kvx"
alter 72 '\377\177' && expect 1 "$photos" --extract "$dir/bad.kvx"         # NaN in Q
alter $((size - 2)) '\0\174' && expect 1 "$photos" --extract "$dir/bad.kvx" # infinity in V
