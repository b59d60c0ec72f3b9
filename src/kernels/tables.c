/* tables.c - the CPU kernel tables and the choice among them. Compiled for the baseline CPU. */
#include "kernels.h"

const struct kvc_kernels kvc_kernels_ref = {
    .name = "ref",
    .range_rows = kvc_range_rows_ref,
    .quantize_fixed = kvc_quantize_fixed_ref,
    .quantize_tokens = kvc_quantize_tokens_ref,
    .quantize_channels = kvc_quantize_channels_ref,
    .dequantize_rows = kvc_dequantize_rows_ref,
    .store_rows = kvc_store_rows_ref,
    .load_rows = kvc_load_rows_ref,
    .transform_rows = kvc_transform_rows_ref,
    .seal_page = kvc_seal_page_ref,
    .read_page = kvc_read_page_ref,
    .move_rows = kvc_move_rows_ref,
    .clear_page = kvc_clear_page_ref,
    .attend_pages = kvc_attend_pages_ref,
    .attend_block = kvc_attend_block_ref,
    .mass_pages = kvc_mass_pages_ref,
    .attend_rows = kvc_attend_rows_ref,
    .merge_parts = kvc_merge_parts_ref,
    .mass_parts = kvc_mass_parts_ref,
    .finish_rows = kvc_finish_rows_ref,
    .dot_rows = kvc_dot_rows_ref,
    .lse_block = kvc_lse_block_ref,
    .mass_block = kvc_mass_block_ref,
    .mix_rows = kvc_mix_rows_ref,
    .rotate_rows = kvc_rotate_rows_ref,
    .gather_rows = kvc_gather_rows_ref,
};

#ifdef KVC_X86
const struct kvc_kernels kvc_kernels_avx2 = {
    .name = "avx2",
    .range_rows = kvc_range_rows_avx2,
    .quantize_fixed = kvc_quantize_fixed_avx2,
    .quantize_tokens = kvc_quantize_tokens_avx2,
    .quantize_channels = kvc_quantize_channels_avx2,
    .dequantize_rows = kvc_dequantize_rows_avx2,
    .store_rows = kvc_store_rows_avx2,
    .load_rows = kvc_load_rows_avx2,
    .transform_rows = kvc_transform_rows_avx2,
    .seal_page = kvc_seal_page_avx2,
    .read_page = kvc_read_page_avx2,
    .move_rows = kvc_move_rows_ref,   /* compaction, once a removal; bound by page copies */
    .clear_page = kvc_clear_page_ref, /* memset */
    .attend_pages = kvc_attend_pages_avx2,
    .attend_block = kvc_attend_block_avx2,
    .mass_pages = kvc_mass_pages_avx2,
    .attend_rows = kvc_attend_rows_avx2,
    .merge_parts = kvc_merge_parts_avx2,
    .mass_parts = kvc_mass_parts_avx2,
    .finish_rows = kvc_finish_rows_avx2,
    .dot_rows = kvc_dot_rows_avx2,
    .lse_block = kvc_lse_block_avx2,
    .mass_block = kvc_mass_block_avx2,
    .mix_rows = kvc_mix_rows_avx2,
    .rotate_rows = kvc_rotate_rows_avx2,
    .gather_rows = kvc_gather_rows_ref, /* bound by memory */
};

const struct kvc_kernels kvc_kernels_avx512 = {
    .name = "avx512",
    .range_rows = kvc_range_rows_avx512,
    .quantize_fixed = kvc_quantize_fixed_avx512,
    .quantize_tokens = kvc_quantize_tokens_avx512,
    .quantize_channels = kvc_quantize_channels_avx512,
    .dequantize_rows = kvc_dequantize_rows_avx512,
    .store_rows = kvc_store_rows_avx512,
    .load_rows = kvc_load_rows_avx512,
    .transform_rows = kvc_transform_rows_avx512,
    .seal_page = kvc_seal_page_avx512,
    .read_page = kvc_read_page_avx512,
    .move_rows = kvc_move_rows_ref,   /* compaction, once a removal; bound by page copies */
    .clear_page = kvc_clear_page_ref, /* memset */
    .attend_pages = kvc_attend_pages_avx512,
    .attend_block = kvc_attend_block_avx512,
    .mass_pages = kvc_mass_pages_avx512,
    .attend_rows = kvc_attend_rows_avx512,
    .merge_parts = kvc_merge_parts_avx512,
    .mass_parts = kvc_mass_parts_avx512,
    .finish_rows = kvc_finish_rows_avx512,
    .dot_rows = kvc_dot_rows_avx512,
    .lse_block = kvc_lse_block_avx512,
    .mass_block = kvc_mass_block_avx512,
    .mix_rows = kvc_mix_rows_avx512,
    .rotate_rows = kvc_rotate_rows_avx512,
    .gather_rows = kvc_gather_rows_ref, /* bound by memory */
};

/* AVX-512 with dot products of bytes, which only attention has a use for. */
const struct kvc_kernels kvc_kernels_vnni = {
    .name = "vnni",
    .range_rows = kvc_range_rows_avx512,
    .quantize_fixed = kvc_quantize_fixed_avx512,
    .quantize_tokens = kvc_quantize_tokens_avx512,
    .quantize_channels = kvc_quantize_channels_avx512,
    .dequantize_rows = kvc_dequantize_rows_avx512,
    .store_rows = kvc_store_rows_avx512,
    .load_rows = kvc_load_rows_avx512,
    .transform_rows = kvc_transform_rows_avx512,
    .seal_page = kvc_seal_page_avx512,
    .read_page = kvc_read_page_avx512,
    .move_rows = kvc_move_rows_ref,   /* compaction, once a removal; bound by page copies */
    .clear_page = kvc_clear_page_ref, /* memset */
    .attend_pages = kvc_attend_pages_vnni,
    .attend_block = kvc_attend_block_avx512, /* products of floats */
    .mass_pages = kvc_mass_pages_vnni,
    .attend_rows = kvc_attend_rows_vnni,
    .merge_parts = kvc_merge_parts_avx512,
    .mass_parts = kvc_mass_parts_avx512,
    .finish_rows = kvc_finish_rows_avx512,
    .dot_rows = kvc_dot_rows_avx512,
    .lse_block = kvc_lse_block_avx512,
    .mass_block = kvc_mass_block_avx512,
    .mix_rows = kvc_mix_rows_avx512,
    .rotate_rows = kvc_rotate_rows_avx512,
    .gather_rows = kvc_gather_rows_ref, /* bound by memory */
};
#endif

const struct kvc_kernels *const *kvc_kernels_available(void)
{
#ifdef KVC_X86
    static const struct kvc_kernels *const all[] = {&kvc_kernels_vnni, &kvc_kernels_avx512,
                                                    &kvc_kernels_avx2, &kvc_kernels_ref, NULL};
    /* Every CPU with AVX2 has F16C, which clang 14 cannot ask for. */
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return all + 3;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return __builtin_cpu_supports("avx512vnni") ? all : all + 1;
    return all + 2;
#else
    static const struct kvc_kernels *const all[] = {&kvc_kernels_ref, NULL};
    return all;
#endif
}
