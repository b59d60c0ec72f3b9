// selftest_fragments.cc - where ldmatrix, movmatrix and mma put the elements of a matrix, against
// the tables of the PTX ISA.
#include "selftest.h"

namespace
{

constexpr int n_lanes = 32;

// Group and thread of a lane, as the figures of the ISA number them.
constexpr int group_of[n_lanes] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3,
                                   4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7};
constexpr int thread_of[n_lanes] = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3,
                                    0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};

// Row and column of the i-th element in the registers of lane 0. A lane of group g and thread t
// holds A from row g and column (elements a word) * t on, B from that row and column g on.
struct place {
    int row, column;
};
constexpr place half_a[8] = {{0, 0}, {0, 1}, {8, 0}, {8, 1}, {0, 8}, {0, 9}, {8, 8}, {8, 9}};
constexpr place half_b[4] = {{0, 0}, {1, 0}, {8, 0}, {9, 0}};
constexpr place byte_a[16] = {{0, 0},  {0, 1},  {0, 2},  {0, 3},  {8, 0},  {8, 1},
                              {8, 2},  {8, 3},  {0, 16}, {0, 17}, {0, 18}, {0, 19},
                              {8, 16}, {8, 17}, {8, 18}, {8, 19}};
constexpr place byte_b[8] = {{0, 0}, {1, 0}, {2, 0}, {3, 0}, {16, 0}, {17, 0}, {18, 0}, {19, 0}};
constexpr place sum_c[4] = {{0, 0}, {0, 1}, {8, 0}, {8, 1}};

struct registers {
    uint32_t a[4], b[2];
    float c[4];
    int n[4];
};

enum class kind { half, s8, u8 };

__global__ void multiply(registers *r, kind what)
{
    registers &x = r[threadIdx.x];

    if (what == kind::half)
        mma_m16n8k16_f16(x.c, x.a[0], x.a[1], x.a[2], x.a[3], x.b[0], x.b[1]);
    else if (what == kind::s8)
        mma_m16n8k32_s8(x.n, x.a[0], x.a[1], x.a[2], x.a[3], x.b[0], x.b[1]);
    else
        mma_m16n8k32_u8s8(x.n, x.a[0], x.a[1], x.a[2], x.a[3], x.b[0], x.b[1]);
}

void put(uint32_t *words, int bits, int i, uint32_t value)
{
    words[i * bits / 32] |= (value & ((1u << bits) - 1)) << i * bits % 32;
}

uint32_t half_bits(int x)
{
    return __half_as_ushort(__float2half(float(x)));
}

void mma(kind what)
{
    const bool halves = what == kind::half;
    const int depth = halves ? 16 : 32, bits = halves ? 16 : 8, per_word = 32 / bits;
    std::vector<registers> lanes(n_lanes);
    int a[16][32], b[32][8], c[16][8];
    generator random{7};

    for (auto &row : a)
        for (int &x : row)
            x = what == kind::u8 ? random.between(0, 255) : random.between(-128, 127);
    for (auto &row : b)
        for (int &x : row)
            x = random.between(-128, 127);
    for (auto &row : c)
        for (int &x : row)
            x = random.between(-1000, 1000);
    for (int l = 0; l < n_lanes; l++) {
        const int g = group_of[l], t = thread_of[l] * per_word;
        for (int i = 0; i < 4 * per_word; i++) {
            const place p = halves ? half_a[i] : byte_a[i];
            const int x = a[p.row + g][p.column + t];
            put(lanes[size_t(l)].a, bits, i, halves ? half_bits(x) : uint32_t(x));
        }
        for (int i = 0; i < 2 * per_word; i++) {
            const place p = halves ? half_b[i] : byte_b[i];
            const int x = b[p.row + t][p.column + g];
            put(lanes[size_t(l)].b, bits, i, halves ? half_bits(x) : uint32_t(x));
        }
        for (int i = 0; i < 4; i++) {
            lanes[size_t(l)].n[i] = c[sum_c[i].row + g][sum_c[i].column + 2 * thread_of[l]];
            lanes[size_t(l)].c[i] = float(lanes[size_t(l)].n[i]);
        }
    }
    const device_array<registers> device(lanes);
    CUDA(kvc_launch(multiply, 1, n_lanes, 0, nullptr, device.data, what));
    const std::vector<registers> result = device.values();
    for (int l = 0; l < n_lanes; l++)
        for (int i = 0; i < 4; i++) {
            const int row = sum_c[i].row + group_of[l];
            const int column = sum_c[i].column + 2 * thread_of[l];
            int sum = c[row][column];
            for (int k = 0; k < depth; k++)
                sum += a[row][k] * b[k][column];
            const registers &r = result[size_t(l)];
            CHECK(halves ? r.c[i] == float(sum) : r.n[i] == sum);
        }
}

void mma_of_halves()
{
    mma(kind::half);
}

void mma_of_signed_bytes()
{
    mma(kind::s8);
}

void mma_of_unsigned_bytes()
{
    mma(kind::u8);
}

typedef uint16_t tile_rows[n_lanes][8];

struct loaded {
    uint32_t x1[1], x2[2], x4[4], x2_trans[2], x4_trans[4], moved;
};

// Row r of the tile is row row_of[r] of the matrices.
__global__ void load(const uint16_t *rows, const int *row_of, loaded *out)
{
    KVC_SHARED(tile_rows, tile);
    const int lane = int(threadIdx.x);
    loaded &x = out[lane];

    for (int i = 0; i < 8; i++)
        tile[row_of[lane]][i] = rows[lane * 8 + i];
    __syncwarp();
    const uint32_t address = smem_u32(tile[row_of[lane]]);
    ldmatrix_x1(x.x1, lane < 8 ? address : 0); // the other lanes' addresses do not count
    ldmatrix_x2(x.x2, lane < 16 ? address : 0);
    ldmatrix_x4(x.x4, address);
    ldmatrix_x2_trans(x.x2_trans, lane < 16 ? address : 0);
    ldmatrix_x4_trans(x.x4_trans, address);
    x.moved = movmatrix_trans(x.x1[0]);
}

// Element (r, c) of matrix i.
uint32_t element(int i, int r, int c)
{
    return uint32_t(100 * (8 * i + r) + c);
}

void matrices_of_halfwords()
{
    std::vector<uint16_t> rows(n_lanes * 8);
    std::vector<int> row_of(n_lanes);

    for (int r = 0; r < n_lanes; r++) {
        row_of[size_t(r)] = (5 * r + 3) % n_lanes;
        for (int c = 0; c < 8; c++)
            rows[size_t(8 * r + c)] = uint16_t(element(r / 8, r % 8, c));
    }
    const device_array<uint16_t> device_rows(rows);
    const device_array<int> device_row_of(row_of);
    const device_array<loaded> device_out(n_lanes);
    CUDA(kvc_launch(load, 1, n_lanes, 0, nullptr, device_rows.data, device_row_of.data,
                    device_out.data));
    const std::vector<loaded> out = device_out.values();
    for (int l = 0; l < n_lanes; l++)
        for (int i = 0; i < 4; i++) {
            const loaded &x = out[size_t(l)];
            const int g = group_of[l], c = 2 * thread_of[l];
            const uint32_t word = element(i, g, c) | element(i, g, c + 1) << 16;
            const uint32_t trans = element(i, c, g) | element(i, c + 1, g) << 16;
            CHECK(x.x4[i] == word && x.x4_trans[i] == trans);
            CHECK(i >= 2 || (x.x2[i] == word && x.x2_trans[i] == trans));
            CHECK(i >= 1 || (x.x1[i] == word && x.moved == trans));
        }
}

__global__ void load_pitched(int pitch, uint32_t *out)
{
    KVC_DYN_SHARED(uint8_t, rows);
    uint32_t words[1];

    for (int i = int(threadIdx.x); i < 8 * pitch; i += n_lanes)
        rows[i] = 0;
    __syncwarp();
    ldmatrix_x1(words, smem_u32(rows) + uint32_t(int(threadIdx.x) % 8 * pitch));
    out[threadIdx.x] = words[0];
}

void bank_conflicts_are_counted()
{
    const struct {
        int pitch;
        uint64_t n_extra;
    } expected[] = {{16, 0}, {32, 1}, {64, 3}, {128, 7}, {144, 0}, {256, 7}};
    const device_array<uint32_t> out(n_lanes);
    struct emu_stats stats;

    for (const auto &e : expected) {
        emu_reset_stats();
        CUDA(kvc_launch(load_pitched, 1, n_lanes, size_t(8 * e.pitch), nullptr, e.pitch, out.data));
        CUDA(cudaDeviceSynchronize());
        emu_get_stats(&stats);
        CHECK(stats.ldmatrix == 1 && stats.ldmatrix_conflict == e.n_extra);
    }
}

} // namespace

const test_group fragment_cases = {
    {"mma_of_halves", mma_of_halves, nullptr, every_build},
    {"mma_of_signed_bytes", mma_of_signed_bytes, nullptr, every_build},
    {"mma_of_unsigned_bytes", mma_of_unsigned_bytes, nullptr, every_build},
    {"matrices_of_halfwords", matrices_of_halfwords, nullptr, every_build},
    {"bank_conflicts_are_counted", bank_conflicts_are_counted, nullptr, every_build},
};
