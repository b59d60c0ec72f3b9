/* vnni.c - compiled with the flags of avx512.c and -mavx512vnni; holds kernels only, never start-up
 * code. */
#include "vec_vnni.h"

/* The templates; each uses the words above. */
#include "exp_tmpl.h"

#include "lines_tmpl.h"

#include "dots_tmpl.h"

#include "scores_tmpl.h"

#include "values_tmpl.h"

#include "attend_tmpl.h"

#include "rows_avx512.h"

#include "rows_tmpl.h"
