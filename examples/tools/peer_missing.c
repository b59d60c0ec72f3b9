/* peer_missing.c - 'kvc-bench peer' where CMake found no ggml. */
#include <stdio.h>

#include "peer.h"

int peer_run(const struct peer_options *options)
{
    (void)options;
    fprintf(stderr, "kvc-bench peer: built without ggml; examples/peers/attention.sh installs it "
                    "and builds again\n");
    return BENCH_FAILED;
}
