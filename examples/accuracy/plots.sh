#!/usr/bin/env bash
# plots.sh RESULTS.csv FOLDER [PEERS.csv] - draws the figures of docs/accuracy.md: bits against KL, and KL by
# position.
set -euo pipefail

csv=$1
out=$2
peers=${3:-}
data=$(mktemp -d)
trap 'rm -rf "$data"' EXIT

# pick RUN [BUCKETS]: rows "bits kl name to" of a run: its totals, or its buckets.
pick()
{
    awk -F, -v run="$1" -v buckets="${2:-}" '
        NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
        $at["run"] != run || $at["kl"] == 0 { next }
        {
            total = run !~ /long/ || $at["to"] - $at["from"] != 1024
            if (total == (buckets == ""))
                printf "%s %s \"%s\" %s\n", $at["bits"], $at["kl"], $at["kv"], $at["to"]
        }' "$csv"
}

# pick_peers MODEL PLAIN: the same of llama.cpp on the same text, where it rotates (0) or not (1).
pick_peers()
{
    [ -f "$peers" ] || return 0
    awk -F, -v model="$1" -v plain="$2" '
        NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
        index($at["model"], model) == 1 && $at["text"] == "text.txt" && $at["bucket"] == "all" &&
            $at["kl"] > 0 && ($at["name"] ~ / plain$/) == plain {
            split($at["name"], words, " ")
            printf "%s %s \"%s\"\n", $at["bits"], $at["kl"], words[2]
        }' "$peers"
}

for name in smollm2 gemma; do
    model=SmolLM2
    [ $name = smollm2 ] || model=gemma
    pick $name-text >"$data/$name.ours"
    pick $name-steps-text | grep -E '(plain|imm)"' >"$data/$name.other" || true
    pick_peers $model 0 >"$data/$name.peers"
    pick_peers $model 1 >"$data/$name.plain"
    pick $name-long buckets >"$data/$name.long"
done

cat >"$data/plot" <<EOF
set terminal pngcairo noenhanced size 1200,600 font 'sans,10'
set logscale y
set format y '%g'
set grid
set output '$out/bits.new'
set multiplot layout 1,2
set key bottom left Left reverse
set xlabel 'bits an element, parameters counted'
set ylabel 'mean KL to an F16 cache, nats'
set xrange [3.5:9.5]
set yrange [1e-6:2]
# Labels stand beside their points, on the side where nothing else is.
is_left(name) = name eq 'int4' || strstrt(name, ':r') || strstrt(name, ':plain')
do for [name in "smollm2 gemma"] {
    set title name
    plot '$data/'.name.'.ours' using 1:2 with points pt 7 ps 1.4 lc rgb '#1b6ca8' title 'libkvc', \\
        '' using 1:2:(is_left(strcol(3)) ? strcol(3) : '') \\
            with labels right offset -0.9,0 font ',8' tc rgb '#1b6ca8' notitle, \\
        '' using 1:2:(is_left(strcol(3)) ? '' : strcol(3)) \\
            with labels left offset 0.9,0 font ',8' tc rgb '#1b6ca8' notitle, \\
        '$data/'.name.'.other' using 1:2 with points pt 6 ps 1.2 lc rgb '#7a7a7a' \\
            title 'libkvc, no transforms or no exact page', \\
        '' using 1:2:(is_left(strcol(3)) ? strcol(3) : '') \\
            with labels right offset -0.9,0 font ',8' tc rgb '#7a7a7a' notitle, \\
        '' using 1:2:(is_left(strcol(3)) ? '' : strcol(3)) \\
            with labels left offset 0.9,0 font ',8' tc rgb '#7a7a7a' notitle, \\
        '$data/'.name.'.peers' using 1:2 with points pt 9 ps 1.4 lc rgb '#c1440e' title 'llama.cpp', \\
        '' using 1:2:3 with labels left offset 0.9,-0.3 font ',8' tc rgb '#c1440e' notitle, \\
        '$data/'.name.'.plain' using 1:2 with points pt 8 ps 1.4 lc rgb '#c1440e' title 'llama.cpp, not rotated'
}
unset multiplot
set output '$out/positions.new'
set multiplot layout 1,2
set key bottom center horizontal maxcols 3 Right noreverse
set xlabel 'position in the text'
set xrange [0:8300]
do for [name in "smollm2 gemma"] {
    set title name
    plot for [kv in "int8 k6v4 int4 int4:r128 int4:plain int4:imm"] \\
        '$data/'.name.'.long' using (strcol(3) eq kv ? \$4 - 512 : NaN):2 with linespoints pt 7 title kv
}
unset multiplot
EOF
gnuplot "$data/plot" 2>"$data/errors" || { cat "$data/errors" >&2; exit 1; }
for figure in bits positions; do
    mv "$out/$figure.new" "$out/$figure.png"
done
