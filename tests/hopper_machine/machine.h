// A Hopper multiprocessor on the CPU, as far as the kernels of merope/attention/kernels need one: what a block of threads
// asks of it. Threads run one at a time, in an order that a seed draws, and give way only where they wait.
//
// What is asynchronous on the GPU is late or early here, as the seed draws: bulk copies, products of the tensor cores,
// additions to global memory. The target of a copy is NaN until it has come, products read their operands as late as
// they may. So a wait that is missing gives wrong numbers, and one that never ends is an error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;
typedef long long i64;

struct Index { int x, y, z; };

namespace machine {

constexpr u32 kSharedStart = 512;  // address of the first byte of dynamic shared memory: kernels align it themselves
constexpr u32 kMostShared = 227 * 1024;

// All blocks of a grid, one after the other. Empty, or what went wrong.
std::string run(Index grid, int threads, u32 shared_bytes, u32 seed, const std::function<void()>& kernel);

// ---- of the thread that runs ----------------------------------------------------------------------------------------

char* shared(u32 address, u32 bytes);  // of dynamic shared memory; an error beyond its end

// Numbers of all lanes in `mask`, which this thread's lane is one of; each waits for all.
const u32* collect(u32 mask, u32 number);
void arrive_named(int id, int threads, bool wait);

void init_barrier(u32 barrier, u32 count);
void expect_bytes(u32 barrier, u32 bytes);  // and arrive
void arrive(u32 barrier);
void wait(u32 barrier, u32 parity);

void copy(u32 to, const void* from, u32 bytes, u32 barrier);
void add(float* to, u32 from, u32 bytes);
void wait_until_added();

// d[64, 2 count] (+)= a b by a warpgroup: this thread's part of it. a: in registers, or in shared memory.
struct Operand { u64 descriptor; bool transposed; };
void multiply(float* d, int count, const u32* a_registers, Operand a, Operand b, bool add);
void commit_products();
void wait_for_products(int pending);

// By a warp, at once
void load_matrices(u32* to, u32 row);
void store_transposed(u32 row, const u32* from);
void multiply_warp(float* d, const u32* a, const u32* b);  // d[16, 8] += a[16, 16] b[8, 16]^T

float widened(u32 low_bits);  // of half precision

}  // namespace machine

extern Index threadIdx, blockIdx, blockDim, gridDim;
extern thread_local char dynamic[];
