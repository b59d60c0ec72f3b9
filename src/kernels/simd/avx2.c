/* avx2.c - compiled with -mavx2 -mfma -mf16c; holds kernels only, never start-up code. */
#include "vec_avx2.h"

/* The templates; each uses the words above. */
#include "quant_tmpl.h"

#include "exp_tmpl.h"

#include "lines_tmpl.h"

#include "dots_tmpl.h"

#include "scores_tmpl.h"

#include "values_tmpl.h"

#include "attend_tmpl.h"

#include "block_tmpl.h"

#include "rows_avx2.h"

#include "rows_tmpl.h"

#include "parts_tmpl.h"

#include "page_tmpl.h"

#include "score_tmpl.h"

#include "merge_tmpl.h"

#include "rope_tmpl.h"

#include "transform_tmpl.h"
