// Compiled by test_hopper_layout.py: how the Hopper kernels turn two tiles of keys and values, and queries, on the CPU. Their
// own sources, with packed arithmetic, shared memory and loads in plain C++, one thread after the other. Numbers come from
// stdin and go to stdout.
#include <cstdio>
#include <cstring>

#define __device__
#define __global__ static
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(x)
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
struct float2 { float x, y; };
struct int4 { int x, y, z, w; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct Index { int x, y, z; } threadIdx, blockIdx, gridDim;
float2 make_float2(float x, float y) { return {x, y}; }
uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
int min(int a, int b) { return a < b ? a : b; }
int max(int a, int b) { return a > b ? a : b; }
template <class T> T __ldg(const T* p) { return *p; }
template <class T> void __stwb(T* p, T x) { *p = x; }
int __shfl_sync(u32, int x, int) { return x; }
void __syncwarp(u32 = 0) {}

float number(u32 low_bits) {
    _Float16 half;
    memcpy(&half, &low_bits, 2);
    return half;
}
u32 bits(double x) {
    const _Float16 half = x;
    u16 low_bits;
    memcpy(&low_bits, &half, 2);
    return low_bits;
}
template <bool kBf16> float widen(u16 x) { return number(x); }
template <bool kBf16> u32 narrow_pair(float low, float high) { return bits(low) | bits(high) << 16; }
u32 low_twice(u32 pair) { return pair << 16 | (pair & 0xffff); }
u32 high_twice(u32 pair) { return pair >> 16 | (pair & 0xffff0000); }
u32 fma2(u32 a, u32 b, u32 c) {
    auto one = [](u32 x, u32 y, u32 z) { return bits((double)number(x) * number(y) + number(z)); };
    return one(a, b, c) | one(a >> 16, b >> 16, c >> 16) << 16;
}
u32 mul2(u32 a, u32 b) { return fma2(a, b, 0); }
u32 negate2(u32 a) { return a ^ 0x80008000; }
u32 bounded2(u32 a) { return a; }
char shared_memory[1 << 17];
uint4 load_shared(u32 address) {
    uint4 w;
    memcpy(&w, shared_memory + address, 16);
    return w;
}
void store_shared(u32 address, const uint4& w) { memcpy(shared_memory + address, &w, 16); }
template <int kThreads> void named_sync(int) {}
void let_dependents_start() {}
void wait_for_kernel_before() {}
void fence_async_proxy() {}
void barrier_init(u32, u32) {}
void barrier_expect(u32, u32) {}
void barrier_arrive(u32) {}
void barrier_wait(u32, u32) {}
void copy_bulk(u32, const void*, u32, u32) {}

constexpr bool kPhases = PHASES, kVisible = false;
#include "sources.inc"

constexpr int kTokens = 256, kCameras = 4, kTiles = kTokens / kKeys;

template <class T, int n> struct Read {
    T at[n];
    Read() { if (fread(at, sizeof(T), n, stdin) != n) throw "too little"; }
};

// All tiles lie in shared memory at once.
template <int kKeysAhead> struct AllTiles {
    static constexpr int kAhead = kKeysAhead;
    static u32 tile(int operand, int t) { return (operand * kTiles + t) * kTileBytes; }
    static u32 place(int operand, int token, const Chunk<true>& chunk) {
        const int row = token % kKeys;
        return tile(operand, token / kKeys) + chunk.half * kHalfBytes + row * 128 + ((chunk.c ^ (row & 7)) << 4);
    }
    static u32 turned(int, int) { return 0; }
    static void wait_until_copied(int, int) {}
};

template <class Pipeline>
void turn_as_camera(const AttendParams& p, const u16* keys, const float* key_rotation, const float* key_native) {
    const struct { const float* rotation; } own = {key_rotation};
    auto each_chunk = [](auto&& act) {
        for (int i = 0; i < 2 * kTokens * 16; ++i) act(i / 16 / kTokens, i / 16 % kTokens, Chunk<true>(i / 8 % 2, i % 8));
    };
    each_chunk([&](int operand, int token, const Chunk<true>& chunk) {  // as pack_half
        float x[8];
        chunk.load<false>(x, keys + (operand * kTokens + token) * 128);
        TokenTurn<true>(chunk, key_operator(own, chunk.half, token), key_native + token * 32, false).apply(x, chunk);
        if (!chunk.half && chunk.c < 6) x[4] = -x[4], x[5] = -x[5];
        store_shared(Pipeline::place(operand, token, chunk), packed(x));
    });
    const Tile tile(p, kKeys);
    const SeenTiles seen(p, tile.camera);
    for (int thread = 0; thread < 128; ++thread) turn_tiles(p, tile, Pipeline(), seen, thread);
    for (int thread = 0; kPhases && thread < 96; ++thread) turn_directions(p, tile, Pipeline(), seen, thread);
    static u16 turned[2 * kTokens * 128];
    each_chunk([&](int operand, int token, const Chunk<true>& chunk) {
        chunk.scatter(turned + (operand * kTokens + token) * 128, load_shared(Pipeline::place(operand, token, chunk)));
    });
    fwrite(turned, sizeof(turned), 1, stdout);
}

void turn_queries(const AttendParams& p, const u16* queries) {  // as load_queries
    static u16 turned[kTokens * 128];
    for (int i = 0; i < kTokens * 16; ++i) {
        const int token = i / 16;
        const Chunk<true> chunk(i / 8 % 2, i % 8);
        float x[8];
        chunk.load<false>(x, queries + token * 128);
        TokenTurn<true>(chunk, query_operator(p, chunk, token), p.native + token * 32, true).apply(x, chunk);
        chunk.scatter(turned + token * 128, packed(x));
    }
    fwrite(turned, sizeof(turned), 1, stdout);
}

int main() {
    static const Read<u16, 2 * kTokens * 128> keys;  // and values
    static const Read<u16, kTokens * 128> queries;
    static const Read<float, kTokens * 9> key_rotation, disparity;
    static const Read<float, kTokens * 32> key_native, native;
    static const Read<float, kTokens * kOwnFloats> rotation;
    static const Read<u32, kCameras * kTokens * kViewWords> views;
    static const Read<u32, kCameras * kCameras * 12> phasors;
    AttendParams p = {};
    p.disparity = disparity.at, p.rotation = rotation.at, p.native = native.at;
    p.key_views = views.at, p.phasors = (const uint4*)phasors.at;
    p.batch = p.heads = 1, p.cameras = p.key_cameras = kCameras, p.tokens_per_camera = kTokens / kCameras;
    p.queries = p.keys = p.padded_keys = kTokens;
    blockIdx.x = CAMERA;
    turn_as_camera<AllTiles<0>>(p, keys.at, key_rotation.at, key_native.at);
    turn_as_camera<AllTiles<1>>(p, keys.at, key_rotation.at, key_native.at);
    turn_queries(p, queries.at);
}
