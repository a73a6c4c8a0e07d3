// What the tensor cores compute, at once: machine.cpp says when.
#pragma once

#include "machine.h"

namespace machine {

constexpr int kLanes = 32;

struct Product {  // of one warp: 16 rows of 64
    const u32* a_registers[kLanes];
    float* d[kLanes];
    Operand a, b;
    int count;
    bool add;
};
void do_product(const Product& p, int warp);  // of a warp of its warpgroup, 0 to 3

}  // namespace machine
