#include "products.h"

#include <cstring>

namespace machine {
namespace {

struct Halves {  // all numbers of half precision
    float wide[1 << 16];
    Halves() {
        for (u32 i = 0; i < 1 << 16; ++i) {
            const u16 low_bits = i;
            _Float16 half;
            memcpy(&half, &low_bits, 2);
            wide[i] = half;
        }
    }
} const halves;

// Numbers of an operand, [16 that are summed, rows]: eight neighbours at a time, in tiles with a swizzle of 128 bytes.
template <int kMostRows>
void read_operand(float (&to)[16][kMostRows], const Operand& x, int first_row, int rows) {
    const u32 start = (x.descriptor & 0x3fff) << 4, leading = (x.descriptor >> 16 & 0x3fff) << 4;
    const u32 stride = (x.descriptor >> 32 & 0x3fff) << 4;
    auto eight_at = [](u32 at) { return (const u16*)shared(at ^ (at >> 7 & 7) << 4, 16); };
    for (int i = 0; i < rows; i += x.transposed ? 8 : 1)
        for (int k = 0; k < 16; k += x.transposed ? 1 : 8) {
            const int row = first_row + i;
            if (x.transposed) {
                const u16* eight = eight_at(start + row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2);
                for (int j = 0; j < 8; ++j) to[k][i + j] = halves.wide[eight[j]];
            } else {
                const u16* eight = eight_at(start + row / 8 * stride + row % 8 * 128 + k * 2);
                for (int j = 0; j < 8; ++j) to[k + j][i] = halves.wide[eight[j]];
            }
        }
}
void read_registers(float (&to)[16][16], const Product& p) {
    for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 16; ++k) {
            const u32 pair = p.a_registers[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            to[k][row] = widened(pair >> 16 * (k % 2));
        }
}
}  // namespace

__attribute__((optimize("O3"))) void do_product(const Product& p, int warp) {
    const int columns = 2 * p.count;
    static float a[16][16], b[16][256], d[16][256];
    if (p.a_registers[0]) read_registers(a, p);
    else read_operand(a, p.a, 16 * warp, 16);
    read_operand(b, p.b, 0, columns);
    auto each = [&](auto&& act) {
        for (int lane = 0; lane < kLanes; ++lane)
            for (int i = 0; i < p.count; ++i)
                act(p.d[lane][i], d[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2]);
    };
    each([&](float& own, float& all) { all = p.add ? own : 0.f; });
    for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 16; ++k)
            for (int column = 0; column < columns; ++column) d[row][column] += a[k][row] * b[k][column];
    each([&](float& own, float& all) { own = all; });
}

float widened(u32 bits) { return halves.wide[bits & 0xffff]; }

}  // namespace machine
