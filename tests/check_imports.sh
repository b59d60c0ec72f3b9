#!/usr/bin/env bash
# Usage: check_imports.sh OBJECT... - what the library takes from outside is memory and string functions
# and mathematics: it cannot print, exit, start a thread or allocate. Only contexts name the heap.
set -euo pipefail

allowed='^(kvc_.*|mem(cpy|set|move|cmp)|bcmp|str(cmp|len)|(exp|log|log1p|expm1|pow|tanh|rint|sqrt|ceil|floor|fmin|fmax)f?|sin|cos|sincos|__cpu_(model|features2|indicator_init)|__popcountdi2|'
allowed+='_GLOBAL_OFFSET_TABLE_|__stack_chk_fail|__(memcpy|memset|memmove)_chk)$'
heap='^(aligned_alloc|free)$'
bad=0
for object; do
    while read -r name; do
        [[ $name =~ $allowed ]] && continue
        [[ $object == */ctx.c.o && $name =~ $heap ]] && continue
        echo "$object needs $name"
        bad=1
    done < <(nm -u "$object" | awk '{print $2}')
done
[ $# -gt 0 ] && [ $bad = 0 ]
