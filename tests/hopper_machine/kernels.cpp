// The Hopper kernels of merope/attention/kernels as a library for the CPU. What CUDA and hopper_instructions.cuh give
// them stands here in C++; all other sources are compiled as they are, from `sources.inc`.
#include <cmath>
#include <cstring>

#include "machine.h"

// ---- CUDA -----------------------------------------------------------------------------------------------------------

#define __device__
#define __global__ static
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ thread_local
#define __align__(n) __attribute__((aligned(n)))

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct int4 { int x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

template <class To, class From> To of_bits(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    memcpy(&y, &x, sizeof(y));
    return y;
}
inline float __uint_as_float(u32 x) { return of_bits<float>(x); }
inline float __int_as_float(int x) { return of_bits<float>(x); }
inline u32 __float_as_uint(float x) { return of_bits<u32>(x); }
inline int __float_as_int(float x) { return of_bits<int>(x); }
inline float __logf(float x) { return logf(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> void __stwb(T* p, T x) { *p = x; }

inline void __syncthreads() { machine::arrive_named(0, blockDim.x, true); }
inline void __syncwarp(u32 mask = ~0u) { machine::collect(mask, 0); }
template <class T> T __shfl_sync(u32 mask, T x, int lane) {
    return of_bits<T>(machine::collect(mask, of_bits<u32>(x))[lane]);
}
template <class T> T __shfl_xor_sync(u32 mask, T x, int lane) {
    return __shfl_sync(mask, x, threadIdx.x % 32 ^ lane);
}
inline u32 __reduce_max_sync(u32 mask, u32 x) {
    const u32* all = machine::collect(mask, x);
    u32 most = 0;
    for (int lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1 && all[lane] > most) most = all[lane];
    return most;
}
inline bool __any_sync(u32 mask, bool x) { return __reduce_max_sync(mask, x); }

// ---- hopper_instructions.cuh ----------------------------------------------------------------------------------------

constexpr float kLog2E = 1.4426950408889634f;

inline u32 half_bits(double x) { return of_bits<u16>((_Float16)x); }
inline u32 bf16_bits(float x) {
    const u32 bits = __float_as_uint(x);
    return x != x ? 0x7fff : bits + 0x7fff + (bits >> 16 & 1) >> 16;
}
template <bool kBf16> float widen(u16 x) { return kBf16 ? __uint_as_float((u32)x << 16) : machine::widened(x); }
template <bool kBf16> u32 narrow_pair(float low, float high) {
    return kBf16 ? bf16_bits(low) | bf16_bits(high) << 16 : half_bits(low) | half_bits(high) << 16;
}
template <class Act> u32 by_halves(Act act) { return act(0) | act(16) << 16; }
inline u32 low_twice(u32 pair) { return pair << 16 | (pair & 0xffff); }
inline u32 high_twice(u32 pair) { return pair >> 16 | (pair & 0xffff0000); }
inline u32 mul2(u32 a, u32 b) {
    return by_halves([&](int i) { return half_bits(machine::widened(a >> i) * machine::widened(b >> i)); });
}
inline u32 fma2(u32 a, u32 b, u32 c) {
    return by_halves([&](int i) {
        return half_bits((double)machine::widened(a >> i) * machine::widened(b >> i) + machine::widened(c >> i));
    });
}
inline u32 negate2(u32 a) { return a ^ 0x80008000; }
inline u32 bounded2(u32 a) {
    return by_halves([&](int i) {
        const float x = machine::widened(a >> i);
        return x > 16384 ? 0x7400u : x < -16384 ? 0xf400u : a >> i & 0xffff;
    });
}
inline u32 largest2(u32 a, u32 b) {
    return by_halves([&](int i) { return (a >> i & 0xffff) > (b >> i & 0xffff) ? a >> i & 0xffff : b >> i & 0xffff; });
}
inline float infinity() { return INFINITY; }
inline float exp2_fast(float x) {  // denormal results are 0
    return x < -126 ? 0.f : exp2f(x);
}

inline u32 shared_address(const void* p) { return machine::kSharedStart + (u32)((const char*)p - dynamic); }
inline uint4 load_shared(u32 address) { return *(const uint4*)machine::shared(address, 16); }
inline void store_shared(u32 address, const uint4& w) { *(uint4*)machine::shared(address, 16) = w; }
inline void barrier_init(u32 barrier, u32 count) { machine::init_barrier(barrier, count); }
inline void barrier_expect(u32 barrier, u32 bytes) { machine::expect_bytes(barrier, bytes); }
inline void barrier_arrive(u32 barrier) { machine::arrive(barrier); }
inline void barrier_wait(u32 barrier, u32 parity) { machine::wait(barrier, parity); }
inline void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) { machine::copy(to, from, bytes, barrier); }
inline void prefetch_bulk(const void*, u32) {}
inline void fence_async_proxy() {}
inline void fence_barriers() {}
inline void add_bulk(float* to, u32 from, u32 bytes) { machine::add(to, from, bytes); }
inline void wait_until_added_are_read() { machine::wait_until_added(); }
inline void wait_until_added() { machine::wait_until_added(); }
template <int kThreads> void named_sync(int id) { machine::arrive_named(id, kThreads, true); }
template <int kThreads> void named_arrive(int id) { machine::arrive_named(id, kThreads, false); }
template <int kCount> void give_registers() {}
template <int kCount> void take_registers() {}
inline void let_dependents_start() {}
inline void wait_for_kernel_before() {}

inline void wgmma_fence() {}
inline void wgmma_commit() { machine::commit_products(); }
template <int kPending> void wgmma_wait() { machine::wait_for_products(kPending); }
template <class T, int n> void pin(T (&)[n]) {}
inline void load_matrices(u32* to, u32 row) { machine::load_matrices(to, row); }
inline void store_transposed(u32 row, const u32* from) { machine::store_transposed(row, from); }
inline void multiply_warp(float* d, const u32* a, const u32* b) { machine::multiply_warp(d, a, b); }
inline u64 descriptor(u32 address, u32 halves = 16) {
    return (u64)(address >> 4) | (u64)(halves >> 4) << 16 | (u64)(1024 >> 4) << 32;
}
template <bool kTransposedA, bool kTransposedB, int n> void multiply(float (&d)[n], u64 a, u64 b, int add) {
    machine::multiply(d, n, nullptr, {a, kTransposedA}, {b, kTransposedB}, add);
}
template <bool kTransposedB> void multiply_add(float (&d)[64], const u32* a, u64 b) {
    machine::multiply(d, 64, a, {}, {b, kTransposedB}, true);
}

#include "sources.inc"

// ---- launches -------------------------------------------------------------------------------------------------------

static std::string error;

template <class Params>
const char* launch(void (*kernel)(Params), const void* params, Index grid, int threads, u32 shared_bytes, u32 seed) {
    error = machine::run(grid, threads, shared_bytes, seed, [&] { kernel(*(const Params*)params); });
    return error.c_str();
}
// Empty, or what went wrong
extern "C" const char* launch_kernel(
    const char* name, const void* params, int x, int y, int z, int threads, u32 shared_bytes, u32 seed
) {
#define LAUNCH(kernel) if (!strcmp(name, #kernel)) return launch(kernel, params, {x, y, z}, threads, shared_bytes, seed)
#define LAUNCH_EITHER(kernel) LAUNCH(kernel##_bf16); LAUNCH(kernel##_fp16)
    LAUNCH_EITHER(pack_keys);
    LAUNCH_EITHER(attend);
#ifdef HAS_WIDE_TILES
    LAUNCH_EITHER(attend_wide);
#endif
    LAUNCH_EITHER(bound_and_pack);
    LAUNCH_EITHER(pack_queries);
    LAUNCH_EITHER(gradients);
    LAUNCH_EITHER(finish_keys);
    LAUNCH_EITHER(finish_queries);
    return "there is no such kernel";
}
