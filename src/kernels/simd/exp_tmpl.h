/*
 * exp_tmpl.h - template of the exponential of attention and what follows from it. Decisions hang on
 * that of ../exp.h, which no product here is.
 * Parameters: VLEN and the words of vec_avx2.h.
 */
/* exp by 2^n exp(r), |r| <= ln 2 / 2, and the polynomial of degree 5 that is best there (error
 * 1.1e-7, and |n| 2e-9 for the ln 2 of one float). Below -87.3 zero, not a subnormal; above 88.3 as
 * there; NaN stays. */
static inline vf v_exp(vf x)
{
    const vf low = v_set1(-87.3f), one = v_set1(1.0f);
    const vf a = v_min(v_set1(88.3f), v_max(low, x));
    const vi i = i_round(v_mul(a, v_set1(0x1.715476p+0f)));
    const vf r = v_fma(v_from_i(i), v_set1(-0x1.62e430p-1f), a);
    vf p = v_set1(0x1.10621ep-7f);
    p = v_fma(p, r, v_set1(0x1.572adap-5f));
    p = v_fma(p, r, v_set1(0x1.5557b0p-3f));
    p = v_fma(p, r, v_set1(0x1.fffdfap-2f));
    p = v_fma(p, r, one);
    p = v_fma(p, r, one);
    return v_select(v_lt(x, low), v_zero(), v_exp2_scale(p, i));
}

/* tanh: near 0 by Cephes' polynomial, elsewhere by exp(-2 |x|). NaN stays. */
static inline vf v_tanh(vf x)
{
    const vf a = v_abs(x), square = v_mul(x, x), one = v_set1(1.0f);
    const vf e = v_exp(v_mul(a, v_set1(-2.0f)));
    const vf far = v_copysign(v_div(v_sub(one, e), v_add(one, e)), x);
    vf p = v_set1(-5.70498872745e-3f);
    p = v_fma(p, square, v_set1(2.06390887954e-2f));
    p = v_fma(p, square, v_set1(-5.37397155531e-2f));
    p = v_fma(p, square, v_set1(1.33314422036e-1f));
    p = v_fma(p, square, v_set1(-3.33332819422e-1f));
    return v_select(v_lt(a, v_set1(0.625f)), v_fma(v_mul(p, square), x, x), far);
}

/* What a softcap leaves of logits. */
static inline vf v_softcap(vf x, float cap)
{
    return v_mul(v_set1(cap), v_tanh(v_div(x, v_set1(cap))));
}
