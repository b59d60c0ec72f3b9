/* The file of an observation: its bytes, what comes back, what is refused. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kvc/smooth.h"
#include "support/tables.h"

enum { HEADER = 24, COUNTS = 24, SUMS = HEADER + COUNTS, CHECKSUM = 4 };

/* One layer, two query heads, one KV head, one channel: K 3, -1; Q 2, 0.5. By hand, docs/formats.md
 * section 5; the checksum is that of zip over the rest. */
static const unsigned char by_hand[84] = {
    'K',  'V',  'C',  'O', 1, 0, 0,    0,    1, 0, 0, 0, 2, 0, 0, 0, 1,    0,    0,
    0,    1,    0,    0,   0, 2, 0,    0,    0, 0, 0, 0, 0, 1, 0, 0, 0,    0,    0,
    0,    0,    0,    0,   0, 0, 0,    0,    0, 0, 0, 0, 0, 0, 0, 0, 0x08, 0x40, /* 3 */
    0,    0,    0,    0,   0, 0, 0x00, 0x40,                                     /* 2 */
    0,    0,    0,    0,   0, 0, 0x24, 0x40,                                     /* 10 */
    0,    0,    0,    0,   0, 0, 0x11, 0x40,                                     /* 4.25 */
    0xb0, 0x21, 0xb5, 0x99};

static kvc_observation *observe(kvc_ctx *ctx)
{
    const kvc_observed_shape shape = {sizeof(shape), 1, 2, 1, 1};
    float k[2] = {3, -1}, q[2] = {2, 0.5f};
    const kvc_view k_view = kvc_view_packed(k, KVC_DTYPE_F32, 2, 1, 1);
    const kvc_view q_view = kvc_view_packed(q, KVC_DTYPE_F32, 1, 2, 1);
    kvc_observation *o;

    assert_int_equal(kvc_observation_create(ctx, &shape, &o), KVC_OK);
    assert_int_equal(kvc_observe_keys(o, 0, &k_view), KVC_OK);
    assert_int_equal(kvc_observe_queries(o, 0, &q_view), KVC_OK);
    return o;
}

/* Bit by bit, where the library has a table. */
static void seal(unsigned char *file, size_t size)
{
    uint32_t crc = UINT32_MAX;

    for (size_t i = 0; i < size - CHECKSUM; i++) {
        crc ^= file[i];
        for (int b = 0; b < 8; b++)
            crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0u);
    }
    for (size_t i = 0; i < CHECKSUM; i++)
        file[size - CHECKSUM + i] = (unsigned char)(~crc >> 8 * i);
}

static kvc_status load(void **state, const void *bytes, size_t size)
{
    kvc_observation *o = (kvc_observation *)state;
    const kvc_status status = kvc_observation_load(best(state), bytes, size, &o);

    assert_true((o != NULL) == (status == KVC_OK));
    kvc_observation_destroy(o);
    return status;
}

static void put64(unsigned char *at, uint64_t x)
{
    for (size_t i = 0; i < 8; i++)
        at[i] = (unsigned char)(x >> 8 * i);
}

/* The file with one number changed and the right checksum. */
static kvc_status load_with(void **state, size_t at, uint64_t x, size_t n)
{
    unsigned char file[sizeof(by_hand)];

    memcpy(file, by_hand, sizeof(file));
    for (size_t i = 0; i < n; i++)
        file[at + i] = (unsigned char)(x >> 8 * i);
    seal(file, sizeof(file));
    return load(state, file, sizeof(file));
}

static kvc_status load_with_sum(void **state, size_t sum, double x)
{
    uint64_t bits;

    memcpy(&bits, &x, sizeof(bits));
    return load_with(state, SUMS + 8 * sum, bits, 8);
}

static void a_file_has_the_documented_bytes(void **state)
{
    kvc_observation *o = observe(best(state));
    unsigned char file[sizeof(by_hand) + 1] = {0};

    assert_int_equal(kvc_observation_size(o), sizeof(by_hand));
    assert_int_equal(kvc_observation_save(o, file, sizeof(by_hand)), KVC_OK);
    assert_memory_equal(file, by_hand, sizeof(by_hand));
    assert_int_equal(file[sizeof(by_hand)], 0);
    assert_int_equal(kvc_observation_size(NULL), 0);
    kvc_observation_destroy(o);
}

static void what_was_saved_comes_back(void **state)
{
    unsigned char unaligned[sizeof(by_hand) + 1];
    kvc_observed_shape shape = {.struct_size = sizeof(shape)};
    kvc_observed_layer l = {.struct_size = sizeof(l)};
    kvc_observation *o;

    memcpy(unaligned + 1, by_hand, sizeof(by_hand));
    assert_int_equal(kvc_observation_load(best(state), unaligned + 1, sizeof(by_hand), &o), KVC_OK);
    assert_int_equal(kvc_observation_shape(o, &shape), KVC_OK);
    assert_int_equal(shape.n_layers, 1);
    assert_int_equal(shape.n_heads, 2);
    assert_int_equal(shape.n_kv_heads, 1);
    assert_int_equal(shape.head_dim, 1);
    assert_int_equal(kvc_observation_read(o, 0, &l), KVC_OK);
    assert_int_equal(l.n_keys, 2);
    assert_int_equal(l.n_queries, 1);
    assert_int_equal(l.n_nonfinite, 0);
    assert_true(l.k_absmax[0] == 3.0 && l.k_sum[0] == 2.0);
    assert_true(l.k_square[0] == 10.0 && l.q_square[0] == 4.25);
    kvc_observation_destroy(o);
}

static void saving_needs_the_exact_room(void **state)
{
    kvc_observation *o = observe(best(state));
    unsigned char file[sizeof(by_hand) + 1];

    memset(file, 0xa5, sizeof(file));
    assert_int_equal(kvc_observation_save(o, file, sizeof(by_hand) - 1), KVC_E_ARG);
    assert_int_equal(kvc_observation_save(o, file, sizeof(by_hand) + 1), KVC_E_ARG);
    assert_int_equal(kvc_observation_save(o, NULL, sizeof(by_hand)), KVC_E_ARG);
    assert_int_equal(kvc_observation_save(NULL, file, 0), KVC_E_ARG);
    for (size_t i = 0; i < sizeof(file); i++)
        assert_int_equal(file[i], 0xa5);
    kvc_observation_destroy(o);
}

static void every_changed_bit_is_noticed(void **state)
{
    unsigned char file[sizeof(by_hand)];

    memcpy(file, by_hand, sizeof(file));
    for (size_t bit = 0; bit < 8 * sizeof(file); bit++) {
        file[bit / 8] ^= (unsigned char)(1u << bit % 8);
        const kvc_status status = load(state, file, sizeof(file));
        assert_true(status == KVC_E_FORMAT || (bit / 32 == 5 && status == KVC_E_UNSUPPORTED));
        file[bit / 8] ^= (unsigned char)(1u << bit % 8);
    }
}

static void every_truncation_is_noticed(void **state)
{
    for (size_t n = 0; n < sizeof(by_hand); n++) {
        unsigned char *cut = malloc(n + 1); /* of this size, so that reading on is found */
        assert_non_null(cut);
        memcpy(cut, by_hand, n);
        assert_int_equal(load(state, cut, n), KVC_E_FORMAT);
        free(cut);
    }
    unsigned char longer[sizeof(by_hand) + 8] = {0};
    memcpy(longer, by_hand, sizeof(by_hand));
    seal(longer, sizeof(longer));
    assert_int_equal(load(state, longer, sizeof(longer)), KVC_E_FORMAT);
}

static void headers_that_say_nonsense_are_refused(void **state)
{
    assert_int_equal(load_with(state, 4, 1, 4), KVC_OK);
    assert_int_equal(load_with(state, 0, 'k', 1), KVC_E_FORMAT);
    assert_int_equal(load_with(state, 4, 0, 4), KVC_E_FORMAT);
    assert_int_equal(load_with(state, 4, 2, 4), KVC_E_FORMAT);
    for (size_t field = 8; field < HEADER; field += 4) {
        assert_int_equal(load_with(state, field, 0, 4), KVC_E_FORMAT);
        assert_int_equal(load_with(state, field, UINT32_MAX, 4), KVC_E_FORMAT);
    }
    assert_int_equal(load_with(state, 8, 2, 4), KVC_E_FORMAT); /* longer than the file */
    assert_int_equal(load_with(state, 8, 65536, 4), KVC_E_FORMAT);
    assert_int_equal(load_with(state, 16, 3, 4), KVC_E_FORMAT); /* does not divide 2 heads */
    assert_int_equal(load_with(state, 20, 512, 4), KVC_E_FORMAT);
    assert_int_equal(load_with(state, 20, 513, 4), KVC_E_UNSUPPORTED);
}

static void sums_that_no_observation_can_have_are_refused(void **state)
{
    const double most = (double)FLT_MAX; /* of two rows of K and one of two heads of Q */
    const double limits[4] = {most, 2 * most, 2 * most * most, 2 * most * most};

    for (size_t sum = 0; sum < 4; sum++) {
        const bool signed_sum = sum == 1;
        assert_int_equal(load_with_sum(state, sum, 0.0), KVC_OK);
        assert_int_equal(load_with_sum(state, sum, limits[sum]), KVC_OK);
        assert_int_equal(load_with_sum(state, sum, limits[sum] * 1.0001), KVC_E_FORMAT);
        assert_int_equal(load_with_sum(state, sum, (double)INFINITY), KVC_E_FORMAT);
        assert_int_equal(load_with_sum(state, sum, (double)-INFINITY), KVC_E_FORMAT);
        assert_int_equal(load_with_sum(state, sum, (double)NAN), KVC_E_FORMAT);
        assert_int_equal(load_with_sum(state, sum, -1e-300), signed_sum ? KVC_OK : KVC_E_FORMAT);
        assert_int_equal(load_with_sum(state, sum, -limits[sum] * 1.0001), KVC_E_FORMAT);
    }
    assert_int_equal(load_with(state, HEADER, 0, 8), KVC_E_FORMAT);     /* sums of no key */
    assert_int_equal(load_with(state, HEADER + 8, 0, 8), KVC_E_FORMAT); /* of no query */
    assert_int_equal(load_with(state, HEADER, UINT64_C(1) << 48, 8), KVC_OK);
    assert_int_equal(load_with(state, HEADER, (UINT64_C(1) << 48) + 1, 8), KVC_E_FORMAT);
    assert_int_equal(load_with(state, HEADER + 8, UINT64_MAX, 8), KVC_E_FORMAT);
}

/* The largest sums that a file may have, twice. */
static void what_is_made_of_extreme_sums_is_finite(void **state)
{
    unsigned char file[sizeof(by_hand)];
    const double most = (double)FLT_MAX, sums[4] = {most, -2 * most, 2 * most * most, 0.0};
    kvc_observation *a, *b;
    float mean, scale;
    kvc_smooth_options options;

    memcpy(file, by_hand, sizeof(file));
    for (size_t i = 0; i < 4; i++) {
        uint64_t bits;
        memcpy(&bits, &sums[i], sizeof(bits));
        put64(file + SUMS + 8 * i, bits);
    }
    seal(file, sizeof(file));
    assert_int_equal(kvc_observation_load(best(state), file, sizeof(file), &a), KVC_OK);
    assert_int_equal(kvc_observation_load(best(state), file, sizeof(file), &b), KVC_OK);
    assert_int_equal(kvc_observation_merge(a, b), KVC_OK);
    assert_int_equal(kvc_observation_calibrate(a, &mean, &scale), KVC_OK);
    assert_true(mean == -FLT_MAX && isnormal(scale) && scale > 0.0f);
    kvc_smooth_options_default(&options);
    options.rule = KVC_SMOOTH_BALANCE;
    options.pairs = false;
    options.norm = KVC_SMOOTH_PLAIN;
    assert_int_equal(kvc_smooth_scales(a, 0, &options, &scale), KVC_OK);
    assert_true(fabs((double)scale / sqrt(most) - 1.0) < 1e-6);
    kvc_observation_destroy(a);
    kvc_observation_destroy(b);
}

static void missing_pointers_are_refused(void **state)
{
    kvc_observation *o = (kvc_observation *)state;

    assert_int_equal(kvc_observation_load(best(state), by_hand, sizeof(by_hand), NULL), KVC_E_ARG);
    assert_int_equal(kvc_observation_load(NULL, by_hand, sizeof(by_hand), &o), KVC_E_ARG);
    assert_null(o);
    assert_int_equal(kvc_observation_load(best(state), NULL, sizeof(by_hand), &o), KVC_E_ARG);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_file_has_the_documented_bytes),
        cmocka_unit_test(what_was_saved_comes_back),
        cmocka_unit_test(saving_needs_the_exact_room),
        cmocka_unit_test(every_changed_bit_is_noticed),
        cmocka_unit_test(every_truncation_is_noticed),
        cmocka_unit_test(headers_that_say_nonsense_are_refused),
        cmocka_unit_test(sums_that_no_observation_can_have_are_refused),
        cmocka_unit_test(what_is_made_of_extreme_sums_is_finite),
        cmocka_unit_test(missing_pointers_are_refused),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
