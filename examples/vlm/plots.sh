#!/usr/bin/env bash
# plots.sh RESULTS.csv FOLDER - draws the figures of the evaluation from the rows of kvc-engine exam.
# Experiments that the file lacks get no figure.
set -euo pipefail

csv=$1
out=$2
data=$(mktemp -d)
trap 'rm -rf "$data"' EXIT

# pick EXPERIMENT NAME: rows "x accuracy low high n rows cache page pool peak attention step rel_err kl
# kept label", accuracies in per cent with a 95 % interval (Wilson), what was not measured as NaN.
# An empty name picks all.
pick()
{
    awk -F, -v experiment="$1" -v name="$2" '
        function figure(key, factor, text)
        {
            text = $at[key]
            return text == "" ? "NaN" : sprintf("%.8g", factor * text)
        }
        function bound(p, n, sign, z)
        {
            z = 1.96
            if (n == 0 || p == "NaN")
                return "NaN"
            p /= 100
            return 100 * (p + z * z / (2 * n) + sign * z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))) \
                / (1 + z * z / n)
        }
        NR == 1 {
            for (i = 1; i <= NF; i++)
                at[$i] = i
            next
        }
        {
            gsub(/"/, "")
            if ($at["experiment"] != experiment || (name != "" && $at["name"] != name))
                next
            n = $at["n"]
            p = figure("accuracy", 100)
            print $at["x"], p, bound(p, n, -1), bound(p, n, 1), n, figure("rows", 1),
                figure("cache_bytes_per_token", 1), figure("page_bytes_per_token", 1),
                figure("pool_bytes_per_token", 1), figure("peak_cache_bytes", 1),
                figure("attention_us", 1), figure("step_ms", 1), figure("rel_err", 1),
                figure("kl", 1), figure("kept", 100), "\"" $at["name"] "\""
        }' "$csv"
}

# has EXPERIMENT: whether there are rows of it.
has()
{
    grep -q "^\"$1\"," "$csv"
}

# questions EXPERIMENT NAME: asked in the first row of it.
questions()
{
    pick "$1" "$2" | awk 'NR == 1 { print $5 }'
}

# figure NAME: a picture from the commands on standard input; moved into place when it is whole.
figure()
{
    {
        cat <<HEAD
set terminal pngcairo size ${size:-1000,650} font "DejaVu Sans,12" background "white"
set output "$data/$1.png"
black = "#000000"; orange = "#e69f00"; sky = "#56b4e9"; green = "#009e73"
blue = "#0072b2"; red = "#d55e00"; pink = "#cc79a7"; grey = "#888888"
set border 3 lc rgb "#444444"
set tics nomirror out
set grid ytics lc rgb "#dddddd" lw 1
set style fill transparent solid 0.18 noborder
set key outside right top Left reverse samplen 2 spacing 1.25
set bars 0.6
HEAD
        cat
    } | gnuplot
    mv "$data/$1.png" "$out/$1.png"
}

# band FILE COLOUR: the interval of accuracies, for plot.
band()
{
    echo "\"$1\" using 1:3:4 with filledcurves lc rgb $2 notitle"
}

draw_sweep()
{
    local name n

    for name in article soft last middle all learned texture centre random again; do
        pick sweep "$name" >"$data/sweep_$name"
    done
    n=$(questions sweep article)
    figure sweep <<EOT
set title "Which score may prune? Accuracy against the share pruned\n\
{/*0.85 n = $n questions a point; bands: 95 % intervals of the article's score and of chance}"
set xlabel "visual tokens pruned (%)"
set ylabel "questions answered right (%)"
set xrange [0:72]
set key title "scored by"
plot $(band "$data/sweep_article" blue), $(band "$data/sweep_random" grey), \
    "$data/sweep_article" using 1:2 with linespoints lc rgb blue lw 3 pt 7 title "last 4 layers (article)", \
    "$data/sweep_soft" using 1:2 with linespoints lc rgb sky lw 2 pt 6 title "softened (article)", \
    "$data/sweep_last" using 1:2 with linespoints lc rgb green lw 2 pt 5 title "last layer", \
    "$data/sweep_middle" using 1:2 with linespoints lc rgb orange lw 2 pt 9 title "middle layers", \
    "$data/sweep_all" using 1:2 with linespoints lc rgb pink lw 2 pt 11 title "all layers", \
    "$data/sweep_learned" using 1:2 with linespoints lc rgb red lw 2 pt 13 title "learned scorer", \
    "$data/sweep_texture" using 1:2 with linespoints lc rgb orange lw 2 dt 2 pt 8 title "texture alone", \
    "$data/sweep_centre" using 1:2 with linespoints lc rgb green lw 2 dt 2 pt 4 title "centre alone", \
    "$data/sweep_random" using 1:2 with linespoints lc rgb grey lw 3 dt 2 pt 10 title "chance", \
    "$data/sweep_again" using 1:2 with linespoints lc rgb black lw 2 dt 3 pt 12 title "second prefill, n <= 300"
EOT
}

# Kept accuracy and its interval over that of f16, against bytes of f16 over bytes.
draw_tables()
{
    local e

    for e in first second; do
        pick "$e" "" | awk -v experiment="$e" '
            NR == 1 { bytes = $7; right = $2 }
            experiment == "second" && NR == 1 { next }
            { print bytes / $7, 100 * $2 / right, 100 * $3 / right, 100 * $4 / right, $16 }' \
            >"$data/tables_$e"
    done
    cat >"$data/tables_article" <<EOT
1.43 99.1 "prune30"
2.94 98.2 "prune30+int8"
4.55 97.1 "prune30+int8+merge"
EOT
    figure tables <<EOT
set title "What compression costs: accuracy kept against the size of the cache\n\
{/*0.85 n = $(questions first f16) questions a setting, bars: 95 % intervals of the accuracy; f16 = 100 %}"
set xlabel "times smaller than f16 (codes and parameters of a token)"
set ylabel "accuracy, % of that of the whole f16 cache"
set logscale x 2
set xrange [0.93:16]
set yrange [*<90:103<*]
set arrow from graph 0, first 100 to graph 1, first 100 nohead lc rgb grey dt 2
plot "$data/tables_first" using 1:2:3:4 with yerrorbars lc rgb blue lw 2 pt 7 ps 1.4 title "first table", \
    "" using 1:2:5 with labels left offset 0.8,0.8 tc rgb blue notitle, \
    "$data/tables_second" using 1:2:3:4 with yerrorbars lc rgb red lw 2 pt 5 ps 1.4 title "second table", \
    "" using 1:2:5 with labels left offset 0.8,-0.8 tc rgb red notitle, \
    "$data/tables_article" using 1:2 with linespoints lc rgb grey dt 2 pt 8 ps 1.4 title "article's first"
EOT
}

draw_merge()
{
    local question name

    for question in 1 2; do
        for name in bias "no bias" prune; do
            pick "merge$question" "$name" >"$data/merge${question}_${name/ /_}"
        done
    done
    size=1200,620 figure merge <<EOT
set multiplot layout 1,2 title "What does merging change? With and without the bias of merged rows, against pruning\n\
{/*0.85 n = $(questions merge1 bias) questions a point. Pruning leaves as many rows: 432, 324, 243 of 576. Lower is better}" font ",14"
set xlabel "rounds of merging, or as many rows pruned" offset 0,-1
set bmargin 5
set ylabel "mean KL of the first word to the whole cache (nats)"
set xrange [0.8:3.2]
set xtics ("1\n432 rows" 1, "2\n324" 2, "3\n243" 3)
set logscale y
set yrange [1e-5:3e-2]
set format y "10^{%T}"
set key inside bottom right
do for [question = 1:2] {
    set title question == 1 ? "question 1: its words chose the pruned rows" : "question 2: about another part of the picture"
    at = sprintf("$data/merge%d_", question)
    plot at."prune" using 1:(\$1 > 0 ? \$14 : NaN) with linespoints lc rgb orange lw 3 pt 5 ps 1.5 title "prune by attention", \
        at."no_bias" using 1:(\$1 > 0 ? \$14 : NaN) with linespoints lc rgb red lw 3 pt 9 ps 1.5 dt 2 title "merge, without bias", \
        at."bias" using 1:(\$1 > 0 ? \$14 : NaN) with linespoints lc rgb blue lw 3 pt 7 ps 1.5 title "merge, with bias ln(size)"
}
EOT
}

# Names with their x where it tells something.
draw_precision()
{
    pick precision "" | awk '{
        label = $16 (NF > 16 ? " " $17 : "")
        gsub(/"/, "", label)
        if (label ~ /head/)
            label = label ", window " $1
        else if (label ~ /heavy/)
            label = "int4, " 100 * $1 " % heavy f16"
        print NR, $2, $3, $4, $14, $7, "\"" label "  (" int($7 + 0.5) " B)\""
    }' >"$data/precision"
    size=1200,650 figure precision <<EOT
set multiplot layout 1,2 title "How many bits does the cache need? Codes against f16, nothing pruned\n\
{/*0.85 n = $(questions precision f16) questions a row; bars: 95 % intervals; B: bytes a token of 5 layers and 2 heads}" font ",14"
unset key
set yrange [14:0]
set ytics out
set grid xtics ytics lc rgb "#dddddd"
set lmargin 32
set xlabel "questions answered right (%)"
set xtics 2
set title "accuracy: what is lost"
plot "$data/precision" using 2:1:3:4:ytic(7) with xerrorbars lc rgb blue lw 2 pt 7 ps 1.3
set lmargin 4
set format y ""
set logscale x
set xtics auto
set format x "10^{%T}"
set xlabel "mean KL of the first word to f16 (nats)"
set title "KL: what moves before anything is lost"
plot "$data/precision" using (\$5 > 1e-9 ? \$5 : NaN):1 with points lc rgb red pt 7 ps 1.6
EOT
}

draw_gate()
{
    local name

    for name in gate f16 "f16 ample" "gate before" "f16 ample before" pressure rate; do
        pick gate "$name" >"$data/gate_${name// /_}"
    done
    size=1000,950 figure gate <<EOT
set multiplot layout 3,1 title "Image after image in a fixed budget: how the rate follows the pressure, and what it costs\n\
{/*0.85 n = $(questions gate pressure) dialogues of 12 images; f16 without gate ends at image $(awk 'END { print $1 }' "$data/gate_f16")}" font ",14"
set xrange [0.7:12.3]
set key spacing 2.3
set xtics 1
set lmargin 10
set rmargin 32
set yrange [0:100]
set ylabel "%"
plot "$data/gate_pressure" using 1:2 with linespoints lc rgb black lw 3 pt 7 title "pressure: bytes in use\nover usable ones", \
    "$data/gate_rate" using 1:2 with linespoints lc rgb red lw 3 pt 5 title "rate: visual tokens\nthat are to go"
set yrange [0:*]
set ylabel "cache in use (MB)"
plot "$data/gate_f16" using 1:(\$10 / 1e6) with linespoints lc rgb grey lw 3 pt 9 title "f16, until it is full", \
    "$data/gate_gate" using 1:(\$10 / 1e6) with linespoints lc rgb blue lw 3 pt 7 title "with gate"
set yrange [0:100]
set ylabel "answered right (%)"
set xlabel "image"
plot $(band "$data/gate_gate" blue), $(band "$data/gate_gate_before" orange), \
    "$data/gate_f16_ample" using 1:2 with linespoints lc rgb black lw 2 dt 2 pt 6 title "newest image, f16\nin a larger cache", \
    "$data/gate_gate" using 1:2 with linespoints lc rgb blue lw 3 pt 7 title "newest image, gate", \
    "$data/gate_f16_ample_before" using 1:2 with linespoints lc rgb grey lw 2 dt 3 pt 8 title "newest of the other kind,\nf16 in a larger cache", \
    "$data/gate_gate_before" using 1:2 with linespoints lc rgb orange lw 3 pt 5 title "newest of the other\nkind, gate"
EOT
}

draw_turns()
{
    local name

    for name in f16 "int4 recent 0" "int4 recent 256"; do
        pick turns "$name" >"$data/turns_${name// /_}"
    done
    size=1000,800 figure turns <<EOT
set multiplot layout 2,1 title "Do errors of INT4 grow with the dialogue? One image, 12 questions in turn\n\
{/*0.85 n = $(questions turns f16) dialogues; all read the right answers, so they differ in nothing but the cache; bands: 95 % intervals}" font ",14"
set xrange [0.5:12.5]
set key spacing 2.3
set xtics 2
set lmargin 10
set rmargin 32
set logscale y
set format y "10^{%T}"
set ylabel "mean KL to f16 (nats)"
plot "$data/turns_int4_recent_0" using 1:(\$1 > 0 ? \$14 : NaN) with linespoints lc rgb red lw 2 pt 7 title "INT4", \
    "$data/turns_int4_recent_256" using 1:(\$1 > 0 ? \$14 : NaN) with linespoints lc rgb blue lw 2 pt 5 title "INT4, newest 256\ntokens f16"
unset logscale y
set format y "%g"
set yrange [0:100]
set ylabel "answered right (%)"
set xlabel "question in turn"
plot $(band "$data/turns_f16" grey), \
    "$data/turns_f16" using 1:2 with linespoints lc rgb black lw 2 pt 9 title "f16", \
    "$data/turns_int4_recent_0" using 1:2 with linespoints lc rgb red lw 2 pt 7 title "INT4", \
    "$data/turns_int4_recent_256" using 1:2 with linespoints lc rgb blue lw 2 pt 5 title "INT4, newest 256\ntokens f16"
EOT
}

draw_positions()
{
    pick positions again >"$data/positions_again"
    pick positions renumbered >"$data/positions_renumbered"
    figure positions <<EOT
set title "Must pruned patches keep their places? A second prefill with and without them\n\
{/*0.85 n = $(questions positions again) questions a point; bands: 95 % intervals}"
set xlabel "visual tokens pruned (%)"
set ylabel "questions answered right (%)"
set xrange [25:70]
set yrange [0:100]
set key spacing 2.3
plot $(band "$data/positions_again" blue), $(band "$data/positions_renumbered" red), \
    "$data/positions_again" using 1:2 with linespoints lc rgb blue lw 3 pt 7 title "places in the grid\nkept (right)", \
    "$data/positions_renumbered" using 1:2 with linespoints lc rgb red lw 3 pt 5 title "counted through\nanew (wrong)"
EOT
}

# at_place N NAME LABEL: the row of "pitfalls" at a place of the axis.
at_place()
{
    pick pitfalls "$2" | awk -v at="$1" -v label="$3" \
        '{ print at, $2, $3, $4, $7, $8, $9, $11, $14, "\"" label "\"" }'
}

draw_pitfalls()
{
    {
        at_place 1 "positions wrong" "1 positions\\\\nfrom rows"
        at_place 3 "forced wrong" "4 nothing forced,\\\\n90 % pruned"
        at_place 5 "recent wrong" "5 INT4, no\\\\nrecent window"
    } >"$data/pitfalls_wrong"
    {
        at_place 1.8 "positions right" ""
        at_place 3.8 "forced right" ""
        at_place 5.8 "recent right" ""
    } >"$data/pitfalls_right"
    {
        at_place 1 "pages wrong" "removed,\\\\nholes left"
        at_place 2 "pages right" "rows moved\\\\ntogether"
        at_place 3 "pages blocks of 16" "blocks\\\\nof 16"
    } >"$data/pitfalls_pages"
    {
        at_place 1 "recent wrong" "INT4, no\\\\nrecent window"
        at_place 2 "recent right" "INT4, newest\\\\n256 tokens f16"
    } >"$data/pitfalls_late"
    pick pitfalls "" | awk '$1 == 2 && $16 ~ /scales/ {
        label = $17
        gsub(/"/, "", label)
        if (label == "f16") { f16 = $7; pool = $9; next }
        if ($18 ~ /right/) { right[label] = 100 * $7 / f16; used[label] = 100 * $9 / pool }
        else wrong[label] = 100 * $7 / f16
    } END {
        print 1, wrong["int8"], right["int8"], used["int8"], "INT8"
        print 2, wrong["int4"], right["int4"], used["int4"], "INT4"
    }' >"$data/pitfalls_scales"
    size=1200,900 figure pitfalls <<EOT
set multiplot layout 2,2 title "The five pitfalls of the article, made and avoided\n\
{/*0.85 n = $(questions pitfalls whole) questions (1, 3, 4); error bars: 95 % intervals}" font ",14"
set key inside top right
set bmargin 4
set boxwidth 0.7
set style fill solid 0.85 noborder
set title "1, 4, 5: answers"
set ylabel "answered right (%)"
set yrange [0:125]
set ytics 0,20,100
set xrange [0.3:6.7]
plot "$data/pitfalls_wrong" using 1:2:xtic(10) with boxes lc rgb red title "wrong", \
    "$data/pitfalls_right" using 1:2 with boxes lc rgb blue title "right", \
    "$data/pitfalls_wrong" using 1:3:(0):(\$4 - \$3) with vectors heads size 0.05,90 lc rgb black notitle, \
    "$data/pitfalls_right" using 1:3:(0):(\$4 - \$3) with vectors heads size 0.05,90 lc rgb black notitle
set title "2: what is claimed and what is allocated"
set ylabel "bytes a token, % of f16"
set yrange [0:80]
set ytics auto
set xrange [0.4:2.6]
set boxwidth 0.22
plot "$data/pitfalls_scales" using (\$1 - 0.25):2:xtic(5) with boxes lc rgb red title "codes alone (wrong)", \
    "" using 1:3 with boxes lc rgb blue title "codes and scales", \
    "" using (\$1 + 0.25):4 with boxes lc rgb sky title "all that a dialogue uses", \
    "" using (\$1 - 0.25):2:(sprintf("%.1f", \$2)) with labels offset 0,0.6 notitle, \
    "" using 1:3:(sprintf("%.1f", \$3)) with labels offset 0,0.6 notitle, \
    "" using (\$1 + 0.25):4:(sprintf("%.1f", \$4)) with labels offset 0,0.6 notitle
set title "3: half of the rows pruned: pages must stay full"
set ylabel "page bytes a visual token"
set y2label "attention a decoded token (us)"
set y2tics
set ytics nomirror
set yrange [0:*]
set y2range [0:*]
set xrange [0.4:3.6]
set key inside bottom right box lc rgb "#dddddd" opaque
plot "$data/pitfalls_pages" using (\$1 - 0.15):6:xtic(10) with boxes lc rgb blue title "pages (left axis)", \
    "" using (\$1 + 0.15):8 axes x1y2 with boxes lc rgb orange title "time (right axis)", \
    "" using (\$1 - 0.15):6:(sprintf("%.0f%% right", \$2)) with labels offset 0,0.6 notitle
unset y2tics
unset y2label
set title "5: KL of the last 8 of 12 turns"
set ylabel "mean KL to f16 (nats)"
unset key
set xrange [0.4:2.6]
plot "$data/pitfalls_late" using 1:9:xtic(10) with boxes lc rgb blue
EOT
}

draw_small()
{
    {
        pick small prune | awk '{ print NR == 1 ? 2 : 4, $0 }'
    } >"$data/small_prune"
    pick small guarded | awk '{ print NR == 1 ? 2.7 : 4.7, $0 }' >"$data/small_guarded"
    pick small f16 | awk '{ print 1, $0 }' >"$data/small_f16"
    figure small <<EOT
set title "Have small images anything to spare? 16 x 16 patches, with and without the gate's guard\n\
{/*0.85 n = $(questions small f16) questions a bar; error bars: 95 % intervals; numbers: rows left of 256}"
set ylabel "questions answered right (%)"
set yrange [0:105]
set xrange [0.3:5.4]
set boxwidth 0.6
set style fill solid 0.85 noborder
set xtics ("nothing pruned" 1, "30 %% pruned" 2.35, "50 %% pruned" 4.35)
plot "$data/small_f16" using 1:3 with boxes lc rgb grey title "whole", \
    "$data/small_prune" using 1:3 with boxes lc rgb red title "pruned", \
    "$data/small_guarded" using 1:3 with boxes lc rgb blue title "guarded", \
    for [name in "f16 prune guarded"] "$data/small_".name using 1:4:(0):(\$5 - \$4) with vectors heads size 0.05,90 lc rgb black notitle, \
    for [name in "f16 prune guarded"] "$data/small_".name using 1:(5):(sprintf("%.0f", \$7)) with labels tc rgb "white" notitle
EOT
}

draw_outliers()
{
    pick outliers "" | awk '{
        label = ""
        for (i = 16; i <= NF; i++)
            label = label (i > 16 ? " " : "") $i
        gsub(/"/, "", label)
        group = label ~ /^outliers/ ? 1 : label ~ /^smoothed/ ? 2 : 0
        part = label ~ /f16/ ? 0 : label ~ /token/ ? 1 : 2
        print 4 * group + part, $2, $3, $4, $14, part
    }' >"$data/outliers"
    figure outliers <<EOT
set multiplot layout 1,2 title "Outliers in the keys: what they cost INT4, and what smoothing gives back\n\
{/*0.85 n = $(questions outliers f16) questions a bar; error bars: 95 % intervals; each outlier is 8 times larger}" font ",14"
set boxwidth 0.85
set style fill solid 0.85 noborder
set xrange [-0.8:10.8]
set xtics ("plain" 1, "outliers" 5, "smoothed" 9)
set key inside top right
set title "accuracy"
set ylabel "questions answered right (%)"
set yrange [0:130]
set ytics 0,20,100
plot for [part = 0:2] "$data/outliers" using (\$6 == part ? \$1 : NaN):2 with boxes lc rgb word(grey." ".blue." ".orange, part + 1) \
        title part == 0 ? "f16" : part == 1 ? "INT4, a scale a token" : "INT4, a scale a head", \
    "" using 1:3:(0):(\$4 - \$3) with vectors heads size 0.05,90 lc rgb black notitle
unset key
set title "KL to f16 of the same model"
set ylabel "mean KL of the first word (nats)"
set logscale y
set format y "10^{%T}"
set yrange [*:*]
set ytics auto
plot for [part = 1:2] "$data/outliers" using (\$6 == part ? \$1 : NaN):5 with points pt 7 ps 2 lc rgb word(grey." ".blue." ".orange, part + 1)
EOT
}

mkdir -p "$out"
if has sweep; then draw_sweep; fi
if has first && has second; then draw_tables; fi
if has merge1 && has merge2; then draw_merge; fi
if has precision; then draw_precision; fi
if has gate; then draw_gate; fi
if has turns; then draw_turns; fi
if has positions; then draw_positions; fi
if has pitfalls; then draw_pitfalls; fi
if has small; then draw_small; fi
if has outliers; then draw_outliers; fi
