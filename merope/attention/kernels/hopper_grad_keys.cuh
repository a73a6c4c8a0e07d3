// Gradients of keys and values leave the tensor cores' layout and the packed channels. A tile of keys that one block of
// threads walks over all query cameras stores its own. One that is cut adds up the sums of its pieces in memory, and
// `finish_keys` stores them: turned out of the last camera's view, sums do not depend on the camera.

constexpr u32 kStepBytes = 64 * 256;  // 64 queries, or what belongs to them; also a half of 64 keys' sums

struct GradParams {
    Tokens grad_k, grad_v;
    const u16* packed_k;       // [batch * heads, 2 halves, padded keys, 64]
    const u16* packed_v;
    const u16* packed_q;
    const u16* packed_grad;
    const float2* rows;
    const float2* bounds;
    float* sums;               // [batch * heads, cameras * padded rows / 64, 2 halves, 8, 128, 4], zeros before
    const float* rotation;     // of keys [tables, keys, 9]; not read with direction phases
    const float* native;       // of keys [tables, keys, 16, 2]
    const u32* key_views;
    const uint4* phasors;
    const int* key_camera;
    i64 tables_per_sample;
    int heads, cameras, padded_rows, keys, padded_keys, key_cameras;
    float scale;
    const int4* seen;          // as of AttendParams
    const int* walks;          // [padded keys / 128, 3 + cameras]: a tile of keys, how many cameras see keys of it,
                               // these cameras, the first of them again; tiles that most cameras see first; kVisible
    float* key_sums;           // [cut tiles, 2 warpgroups, keys and values, 2 halves, 8, 128, 4], zeros before
    int whole_tiles, pieces;   // of all heads' tiles of keys, so many are whole, each of the others is in pieces;
                               // not read with kVisible: there all are whole
};

// ---- pieces of a tile -----------------------------------------------------------------------------------------------

struct KeyPiece {  // of a block of threads: a tile among those of all heads, and some turns of its walk over cameras
    u32 tile;
    int first_turn, turns;
    __device__ __forceinline__ explicit KeyPiece(const GradParams& p)
        : tile(blockIdx.x), first_turn(0), turns(p.cameras) {
        const int later = blockIdx.x - p.whole_tiles;
        if (kVisible || later < 0) return;
        const int piece = later % p.pieces;
        tile = p.whole_tiles + later / p.pieces;
        first_turn = piece * p.cameras / p.pieces;
        turns = (piece + 1) * p.cameras / p.pieces - first_turn;
    }
};

// 32 of each thread's numbers, as they lie, on their way to memory: a warpgroup's in shared memory, for one add_bulk
template <int n>
__device__ __forceinline__ void stage_sums(const float (&d)[n], int first, char* staged, int group, int thread) {
    if (thread == 0) wait_until_added_are_read();
    named_sync<128>(3 + group);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int at = first + 4 * i;
        *(float4*)(staged + (i * 128 + thread) * 16) = make_float4(d[at], d[at + 1], d[at + 2], d[at + 3]);
    }
    fence_async_proxy();
    named_sync<128>(3 + group);
}
__device__ __forceinline__ void add_key_sums(
    const GradParams& p, const float (&dk)[64], const float (&dv)[64], int cut_tile, char* staged, u32 staged_at,
    int group, int thread
) {
    u32 own[1] = {(u32)thread};
    pin(own);  // the compiler would keep addresses made of `thread` through the walk, which has no registers for them
    float* to = p.key_sums + ((i64)cut_tile * 2 + group) * 4 * 4096;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        stage_sums(i < 2 ? dk : dv, i % 2 * 32, staged, group, own[0]);
        if (thread == 0) add_bulk(to + i * 4096, staged_at, kStepBytes);
    }
    if (thread == 0) wait_until_added();  // the sums of a piece
}

// ---- out of the layout ----------------------------------------------------------------------------------------------

__device__ __forceinline__ TokenTurn<false> key_turn(
    const GradParams& p, const Chunk<false>& chunk, int sample, int key
) {
    const i64 at = sample * p.tables_per_sample * p.keys + key;
    return TokenTurn<false>(chunk, key_operator(p, chunk.half, at), p.native + at * 32, true);
}
template <bool kBf16>
__device__ __forceinline__ void store_key_chunk(
    float (&x)[8], const Chunk<false>& chunk, const TokenTurn<false>& turn, u16* token
) {
    if (!chunk.half && chunk.c < 6) x[4] = -x[4], x[5] = -x[5];  // see reflect
    turn.apply(x, chunk);
    chunk.scatter(token, narrowed<kBf16>(x));
}

template <bool kBf16>
__device__ __forceinline__ void store_key_sums(
    const GradParams& p, const Tokens& to, const float (&d)[64], float factor, float* staged, int sample, int head,
    int first_key, int group, int thread
) {
    const int lane = thread & 31;
    u16* out = to.data + sample * to.batch + head * to.head;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        named_sync<128>(3 + group);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int r = i % 2, at = 32 * half + 2 * i;
            *(float2*)(staged + (thread / 32 * 16 + lane / 4 + 8 * r) * 64 + 8 * (i / 2) + 2 * (lane & 3)) =
                make_float2(d[at] * factor, d[at + 1] * factor);
        }
        named_sync<128>(3 + group);
        const Chunk<false> chunk(half, thread & 7);
#pragma unroll 1
        for (int row = thread / 8; row < 64 && first_key + row < p.keys; row += 16) {
            const int key = first_key + row;
            const TokenTurn<false> turn = key_turn(p, chunk, sample, key);
            float x[8];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 two = *(const float2*)(staged + row * 64 + 2 * sum_place(half, chunk.c, i));
                x[2 * i] = two.x, x[2 * i + 1] = two.y;
            }
            store_key_chunk<kBf16>(x, chunk, turn, out + key * to.token);
        }
    }
}

// A thread per row, half and chunk of cut tiles, 16 rows a block: of keys and of values.
template <bool kBf16> __device__ void finish_keys(const GradParams& p) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x, row = index / 16;
    const int tiles = p.padded_keys / kKeys, tile = p.whole_tiles + row / kKeys;  // among those of all heads
    const int pair = tile / tiles, sample = pair / p.heads, head = pair % p.heads;
    const int key = tile % tiles * kKeys + row % kKeys;
    if (key >= p.keys) return;
    const Chunk<false> chunk((index / 8) & 1, index & 7);
    const TokenTurn<false> turn = key_turn(p, chunk, sample, key);
    const HeadScales scales(__ldg(p.bounds + pair));
    const float* sums = p.key_sums + ((i64)(row / 64) * 4 + chunk.half) * 4096;
#pragma unroll
    for (int operand = 0; operand < 2; ++operand) {
        const Tokens& to = operand ? p.grad_v : p.grad_k;
        float x[8];
        const float factor = operand ? scales.undo_weights() : scales.undo_errors(p.scale);
        load_sums(x, sums + operand * 2 * 4096, chunk, row % 64, factor);
        store_key_chunk<kBf16>(x, chunk, turn, to.data + sample * to.batch + head * to.head + key * to.token);
    }
}

extern "C" {
__global__ void __launch_bounds__(256) finish_keys_bf16(const __grid_constant__ GradParams p) { finish_keys<true>(p); }
__global__ void __launch_bounds__(256) finish_keys_fp16(const __grid_constant__ GradParams p) { finish_keys<false>(p); }
}
