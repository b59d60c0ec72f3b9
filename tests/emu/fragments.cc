// fragments.cc - ldmatrix, movmatrix and mma: which element of a matrix lies in which lane's
// register. Lane l is thread t = l % 4 of group g = l / 4, as the PTX ISA counts.
#include "cuda_fp16.h"
#include "emu_device.h"
#include "machine.h"

namespace emu
{
namespace
{

constexpr int n_banks = 8; // of 16 bytes

template <class T> T &argument(const meeting &m, int lane)
{
    return *static_cast<T *>(m.arguments[size_t(lane)]);
}

uint16_t half_of(uint32_t word, int i)
{
    return uint16_t(word >> 16 * i);
}

uint32_t pack(uint16_t low, uint16_t high)
{
    return low | uint32_t(high) << 16;
}

struct matrix {
    uint16_t element[8][8];
};

// What lane l holds of an 8 x 8 matrix: elements 2 t and 2 t + 1 of row g.
uint32_t lane_word(const matrix &x, int lane, bool transposed)
{
    const int g = lane / 4, c = lane % 4 * 2;
    return transposed ? pack(x.element[c][g], x.element[c + 1][g])
                      : pack(x.element[g][c], x.element[g][c + 1]);
}

// Row r of matrix i lies at the address that lane 8 i + r gives.
void load_matrices(const meeting &m)
{
    const int n = argument<ldmatrix_argument>(m, 0).n;
    const bool transposed = argument<ldmatrix_argument>(m, 0).transposed;

    for (int i = 0; i < n; i++) {
        matrix x;
        int n_in_bank[n_banks] = {}, n_passes = 0;
        for (int r = 0; r < 8; r++) {
            const uint32_t address = argument<ldmatrix_argument>(m, 8 * i + r).address;
            const uint8_t *row = check_shared(address, 16, 16, "ldmatrix", m.at);
            tsan_reads(row, 16);
            memcpy(x.element[r], row, 16);
            n_passes = std::max(n_passes, ++n_in_bank[address / 16 % n_banks]);
        }
        stats.ldmatrix++;
        stats.ldmatrix_conflict += uint64_t(n_passes - 1);
        for (int lane = 0; lane < warp_size; lane++)
            argument<ldmatrix_argument>(m, lane).words[i] = lane_word(x, lane, transposed);
    }
}

void transpose_matrix(const meeting &m)
{
    matrix x;

    for (int lane = 0; lane < warp_size; lane++)
        for (int i = 0; i < 2; i++)
            x.element[lane / 4][lane % 4 * 2 + i] =
                half_of(argument<movmatrix_argument>(m, lane).word, i);
    for (int lane = 0; lane < warp_size; lane++)
        argument<movmatrix_argument>(m, lane).word = lane_word(x, lane, true);
}

// m16n8k16: A[16][16] by rows, B[16][8] by columns, C[16][8]; sums in double, rounded once.
void multiply_halves(const meeting &m)
{
    float a[16][16], b[8][16];

    stats.mma++;
    for (int lane = 0; lane < warp_size; lane++) {
        const auto &x = argument<mma_argument<float>>(m, lane);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 8; i++)
            a[g + i / 2 % 2 * 8][2 * t + i % 2 + i / 4 * 8] =
                half_to_float(half_of(x.a[i / 2], i % 2));
        for (int i = 0; i < 4; i++)
            b[g][2 * t + i % 2 + i / 2 * 8] = half_to_float(half_of(x.b[i / 2], i % 2));
    }
    for (int lane = 0; lane < warp_size; lane++) {
        auto &x = argument<mma_argument<float>>(m, lane);
        for (int i = 0; i < 4; i++) {
            const float *row = a[lane / 4 + i / 2 * 8], *column = b[lane % 4 * 2 + i % 2];
            double sum = double(x.c[i]);
            for (int k = 0; k < 16; k++)
                sum += double(row[k]) * double(column[k]);
            x.c[i] = float(sum);
        }
    }
}

int byte_of(uint32_t word, int i, bool is_signed)
{
    const uint32_t byte = word >> 8 * i & 255;
    return is_signed ? int8_t(byte) : int(byte);
}

// m16n8k32: A[16][32] by rows, of either sign; B[32][8] by columns; sums wrap.
void multiply_bytes(const meeting &m)
{
    const bool is_signed = m.variant != 0;
    int a[16][32], b[8][32];

    stats.mma++;
    for (int lane = 0; lane < warp_size; lane++) {
        const auto &x = argument<mma_argument<int>>(m, lane);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 16; i++)
            a[g + i / 4 % 2 * 8][4 * t + i % 4 + i / 8 * 16] =
                byte_of(x.a[i / 4], i % 4, is_signed);
        for (int i = 0; i < 8; i++)
            b[g][4 * t + i % 4 + i / 4 * 16] = byte_of(x.b[i / 4], i % 4, true);
    }
    for (int lane = 0; lane < warp_size; lane++) {
        auto &x = argument<mma_argument<int>>(m, lane);
        for (int i = 0; i < 4; i++) {
            const int *row = a[lane / 4 + i / 2 * 8], *column = b[lane % 4 * 2 + i % 2];
            int sum = 0;
            for (int k = 0; k < 32; k++)
                sum += row[k] * column[k];
            x.c[i] = int(unsigned(x.c[i]) + unsigned(sum));
        }
    }
}

} // namespace

void compute_fragments(const meeting &m)
{
    switch (m.what) {
    case collective::ldmatrix: load_matrices(m); break;
    case collective::movmatrix: transpose_matrix(m); break;
    case collective::mma_f16: multiply_halves(m); break;
    case collective::mma_s8: multiply_bytes(m); break;
    default: break;
    }
}

} // namespace emu
