// MeRoPE's attention in tiles of up to 144 queries of one camera, for grids such as 9×16 tokens.
//
// `attend` has 64 queries a warpgroup. Of 144 queries 16 are left over, and a tile of 16 takes nearly as long as one of
// 128: every tile turns all keys. Here queries are columns of the tensor cores' products, which come in eights:
//   scores[128 keys, 144 queries] = keys queries^T; warpgroup g has keys 64g to 64g + 63;
//   output[128 channels, 144 queries] += values^T weights; warpgroup g has half g of the channels.
// Both need the weights of all keys, so these pass through shared memory, as [144 queries, 64 keys] of either warpgroup.
// Otherwise it is `attend`: the same packed keys, the same turns, the same arithmetic.

constexpr int kWideRows = 144;
constexpr int kWideStages = 2;  // with weights in shared memory no third fits
constexpr u32 kWideHalf = kWideRows * 128;  // bytes: of half of the queries' channels, of the weights of 64 keys
constexpr u32 kWeightsOffset = 2 * kWideHalf;
constexpr u32 kWideTilesOffset = kWeightsOffset + 2 * kWideHalf;
constexpr u32 kWideBarrierOffset = kWideTilesOffset + 2 * kWideStages * kTileBytes;
constexpr u32 kColumnsOffset = kWideBarrierOffset + 2 * 3 * kWideStages * 8;
using WidePipeline = PipelineOf<kWideStages, kWideTilesOffset, kWideBarrierOffset, 1>;

struct Columns {  // of scores: queries
    float shift[kWideRows], factor[kWideRows], parts[8][kWideRows];  // parts: what each warp found
    int outgrown;  // the last tile with weights beyond half precision
};

// Element 4i + 2r + j of a thread is in column 8i + 2 (lane % 4) + j, and in its warpgroup's row
// 16 (warp % 4) + lane / 4 + 8r: a key of scores, a channel of outputs. The 8 lanes with the same lane % 4 have the same
// 36 columns, numbered 2i + j.
struct WideShare : Rows<kWideRows, 256> {
    int group, warp, lane;
    __device__ __forceinline__ WideShare(const Tile& tile, int group, int thread)
        : Rows{128 * group + thread, tile.first, tile.rows, 1}, group(group), warp(4 * group + thread / 32),
          lane(thread & 31) {}
    __device__ __forceinline__ int key(int r) const { return 16 * warp + lane / 4 + 8 * r; }  // of a tile
    __device__ __forceinline__ int column(int i) const { return 8 * i + 2 * (lane & 3); }     // and the next one
};

// ---- columns -------------------------------------------------------------------------------------------------------

// Lanes 16 apart share their columns out: to the upper one those with i >= 9.
template <class Combine>
__device__ __forceinline__ float halved(float lower_half, float upper_half, int lane, Combine combine) {
    const bool upper = lane & 16;
    const float kept = upper ? upper_half : lower_half, sent = upper ? lower_half : upper_half;
    return combine(kept, __shfl_xor_sync(~0u, sent, 16));
}
// The whole warp's rows, to its parts
template <class Combine>
__device__ __forceinline__ void combine_warp(const float (&half)[18], float* parts, int lane, Combine combine) {
    const bool odd = lane & 8;
#pragma unroll
    for (int i = 0; i < 9; ++i) {
        const float kept = odd ? half[2 * i + 1] : half[2 * i], sent = odd ? half[2 * i] : half[2 * i + 1];
        float x = combine(kept, __shfl_xor_sync(~0u, sent, 8));
        x = combine(x, __shfl_xor_sync(~0u, x, 4));
        if (!(lane & 4)) parts[8 * (9 * (lane >> 4) + i) + 2 * (lane & 3) + odd] = x;
    }
}
template <class Combine>
__device__ __forceinline__ void combine_warp(const float (&x)[36], float* parts, int lane, Combine combine) {
    float half[18];
#pragma unroll
    for (int k = 0; k < 18; ++k) half[k] = halved(x[k], x[k + 18], lane, combine);
    combine_warp(half, parts, lane, combine);
}

// ---- softmax -------------------------------------------------------------------------------------------------------
// As `Softmax`: weights are 2^(score scale_log2 + shift), and the first tile sets the shift. Shifts lie in shared memory.
// Where weights of a later tile leave half precision's range, all 256 threads compute the tile's scores once more, from
// keys that they turn themselves (restore_keys), and lower the shifts by their largest.

// A thread's sums. With direction phases registers are short, and lanes 16 apart share their columns out.
constexpr int kOwnSums = 36 - 18 * kPhases;
// A sum beyond it is a tile's that outgrew the shift: 2^80, while all tiles before add up to less than 2^40.
constexpr float kOutgrown = 1.2089258e24f;

__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ float added(float a, float b) { return a + b; }

struct WideSoftmax {
    Columns& columns;
    float scale_log2;
    float sums[kOwnSums];

    // By the largest scores of a tile. kFirst: of the first one; others may only lower the shifts.
    template <bool kFirst> __device__ __forceinline__ void set_shifts(const float (&s)[72], const WideShare& share) {
        float x[36];
#pragma unroll
        for (int k = 0; k < 36; ++k) x[k] = fmaxf(s[4 * (k / 2) + k % 2], s[4 * (k / 2) + k % 2 + 2]);
        combine_warp(x, columns.parts[share.warp], share.lane, larger);
        share.sync();
        const int column = share.thread;
        if (column < kWideRows) {
            float top = columns.parts[0][column];
#pragma unroll
            for (int warp = 1; warp < 8; ++warp) top = fmaxf(top, columns.parts[warp][column]);
            const float own = kWeightShift - top * scale_log2, before = kFirst ? own : columns.shift[column];
            const float lower = fminf(before, own);
            columns.shift[column] = lower;
            columns.factor[column] = exp2_fast(lower - before);
        }
        share.sync();
    }
    // False: one left half precision's range. kAgain: sums have the tile's weights by the shifts of before.
    template <bool kAgain>
    __device__ __forceinline__ bool weigh(u32 (&weights)[36], const float (&s)[72], const WideShare& share) {
        u32 top = 0;
        auto weigh_column = [&](int i) {  // and the next one; the sums of a thread's two rows
            const float2 shift = *(const float2*)(columns.shift + share.column(i));
            float w[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) w[e] = exp2_fast(fmaf(s[4 * i + e], scale_log2, e % 2 ? shift.y : shift.x));
            weights[2 * i] = narrow_pair<false>(w[0], w[1]), weights[2 * i + 1] = narrow_pair<false>(w[2], w[3]);
            top = largest2(top, largest2(weights[2 * i], weights[2 * i + 1]));
            return make_float2(w[0] + w[2], w[1] + w[3]);
        };
#pragma unroll
        for (int i = 0; i < 9; ++i) {
            const float2 a = weigh_column(i), b = weigh_column(i + 9);
            if constexpr (kOwnSums == 36) {
                add<kAgain>(i, i, a, share), add<kAgain>(i + 9, i + 9, b, share);
            } else {
                const float2 half = {halved(a.x, b.x, share.lane, added), halved(a.y, b.y, share.lane, added)};
                add<kAgain>(i, i + 9 * (share.lane >> 4), half, share);
            }
        }
        constexpr u32 kInfinity = 0x7c00;
        return (top & 0xffff) < kInfinity && top >> 16 < kInfinity;
    }
    template <bool kAgain>
    __device__ __forceinline__ void add(int at, int i, const float2& tile, const WideShare& share) {
        float &x = sums[2 * at], &y = sums[2 * at + 1];
        if (kAgain) {
            const float2 factor = *(const float2*)(columns.factor + share.column(i));
            x = x >= kOutgrown ? tile.x : x * factor.x, y = y >= kOutgrown ? tile.y : y * factor.y;
        } else {
            x += tile.x, y += tile.y;
        }
    }
    __device__ __forceinline__ void rescale(float (&out)[72], const WideShare& share) const {
#pragma unroll
        for (int i = 0; i < 18; ++i) {
            const float2 factor = *(const float2*)(columns.factor + share.column(i));
#pragma unroll
            for (int e = 0; e < 4; ++e) out[4 * i + e] *= e % 2 ? factor.y : factor.x;
        }
    }
};

__device__ __forceinline__ void mask_rows(float (&s)[72], int left, const WideShare& share) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const bool padding = share.key(r) >= left;
#pragma unroll
        for (int i = 0; i < 18; ++i)
            if (padding) s[4 * i + 2 * r] = s[4 * i + 2 * r + 1] = -infinity();
    }
}

// ---- tensor cores --------------------------------------------------------------------------------------------------

// scores[64 keys, 144 queries] = keys queries^T
__device__ __forceinline__ void issue_wide_scores(float (&scores)[72], u32 keys, u32 queries) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // 16 channels at a time
        const u64 a = descriptor(keys + i / 4 * kHalfBytes + i % 4 * 32);
        const u64 b = descriptor(queries + i / 4 * kWideHalf + i % 4 * 32);
        multiply<false, false>(scores, a, b, i > 0);
    }
    wgmma_commit();
}
// out[64 channels, 144 queries] += values^T weights^T; `values`: a half of their channels
__device__ __forceinline__ void issue_wide_values(float (&out)[72], u32 values, u32 weights) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // 16 keys at a time
        const u64 a = descriptor(values + i * 2048);
        const u64 b = descriptor(weights + i / 4 * kWideHalf + i % 4 * 32);
        multiply<true, false>(out, a, b, true);
    }
    wgmma_commit();
}
// As rows of queries, swizzled as the tensor cores read them. A matrix is 8 queries by 8 keys.
__device__ __forceinline__ void store_weights(u32 to, const u32 (&weights)[36], const WideShare& share) {
    const int row = 8 * (share.lane / 16) + share.lane % 8, chunk = 2 * (share.warp % 4) + share.lane / 8 % 2;
    to += share.group * kWideHalf + row * 128 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
    for (int i = 0; i < 9; ++i) store_transposed(to + i * 2048, weights + 4 * i);  // 16 queries at a time
}

// ---- the loop over tiles -------------------------------------------------------------------------------------------

// A tile of keys, turned, where weights were: its stage may have the next but one by now. Warpgroup g has half g.
__device__ __forceinline__ void restore_keys(
    const AttendParams& p, const Tile& tile, const WideShare& share, int t, u32 to
) {
    const int row = share.thread % 128, key = t * kKeys + row;
    const i64 half = (i64)(tile.sample * p.heads + tile.head) * 2 + share.group;
    const i64 camera = tile.tables * p.cameras + tile.camera;
    const uint4* from = (const uint4*)(p.packed_k + (half * p.padded_keys + key) * 64);
    const u32* view = p.key_views + (camera * p.padded_keys + t * kKeys) * kViewWords + 4 * row;
    to += share.group * kHalfBytes + row * 128;
    wait_for_kernel_before();  // as in copy_tiles
#pragma unroll
    for (int i = 0; i < 8; ++i) store_shared(to + 16 * i, __ldcg(from + i));
    to += (row & 7) * 16;
    if (share.group == 0) {
        FirstTurn turn;
        turn.load_view(view, row);
        turn.load_phasors(p.phasors + (camera * p.key_cameras + turn.camera) * 3);
        turn_in_place(to, turn, [](int) {});
    } else if (kPhases) {
        DirectionTurn turn;
        turn.load(view);
        turn.turn_in_place(to);
    }
    fence_async_proxy();
    share.sync();
}

template <bool kBf16>
__device__ __forceinline__ void store_wide_output(
    const AttendParams& p, const Tile& tile, const WideShare& share, const float (&out)[72], const Columns& columns,
    char* shared
) {
    float* staged = (float*)(shared + kWideTilesOffset) + share.group * (kWideRows * 64);  // over keys and values
#pragma unroll
    for (int i = 0; i < 18; ++i) {
        const float2 factor = *(const float2*)(columns.factor + share.column(i));
#pragma unroll
        for (int e = 0; e < 4; ++e)
            staged[staged_chunk(share.column(i) + e % 2, 2 * (share.warp % 4) + e / 2) + share.lane / 4] =
                out[4 * i + e] * (e % 2 ? factor.y : factor.x);
    }
    named_sync<128>(2 + share.group);
    const Chunk<true> chunk(share.group, share.thread & 7);
    uint4 words[WideShare::turns()];
    turn_outputs<kBf16>(p, tile, share, staged, chunk, words);
    scatter_outputs(share, chunk, words, shared);  // over the queries
    share.sync();
    store_outputs(p, tile, share, shared);
}

template <bool kBf16>
__device__ __forceinline__ void attend_wide_queries(
    const AttendParams& p, const Tile& tile, const WidePipeline& pipeline, const WideShare& share, char* shared,
    int tiles
) {
    Columns& columns = *(Columns*)(shared + kColumnsOffset);
    const u32 queries = shared_address(shared), weights_at = queries + kWeightsOffset;
    load_queries<kBf16>(p, tile, share, shared);
    columns.outgrown = 0;
    fence_async_proxy();
    share.sync();
    float s[72], out[72] = {};
    u32 weights[36];
    WideSoftmax softmax{columns, p.scale * kLog2E, {}};
    auto issue_scores_from = [&](u32 keys) {
        wgmma_fence();
        issue_wide_scores(s, keys + share.group * (64 * 128), queries);
    };
    auto issue_scores_of = [&](int t) {
        pipeline.wait_until_turned(0, t);
        issue_scores_from(pipeline.tile(0, t));
    };
    auto add_values_of = [&](int t) {
        pipeline.wait_until_turned(1, t);
        pin(out);
        wgmma_fence();
        issue_wide_values(out, pipeline.tile(1, t) + share.group * kHalfBytes, weights_at);
    };
    auto mask_padding = [&](int t) {
        if (t == tiles - 1) mask_rows(s, p.keys - t * kKeys, share);
    };
    auto release = [&](int operand, int t) {
        if (share.lane == 0) barrier_arrive(pipeline.used(operand, t));
    };
    // Warpgroup 0 asks for scores first, and warpgroup 1 when it has the weights of both: they weigh one after the other.
    auto share_weights = [&](int group) {
        if (share.group != group) return;
        fence_async_proxy();
        share.sync();
    };
    issue_scores_of(0);
    wgmma_wait<0>();
    pin(s);
    release(0, 0);
    mask_padding(0);
    softmax.set_shifts<true>(s, share);
    softmax.weigh<false>(weights, s, share);
#pragma unroll 1
    for (int t = 1; t < tiles; ++t) {
        store_weights(weights_at, weights, share);
        share_weights(1);
        issue_scores_of(t);
        share_weights(0);
        add_values_of(t - 1);
        wgmma_wait<1>();
        pin(s);
        release(0, t);
        mask_padding(t);
        // Stored, not voted on at the barrier: the compiler would put weights behind the wait for values.
        if (!softmax.weigh<false>(weights, s, share)) columns.outgrown = t;
        pin(weights);
        wgmma_wait<0>();
        pin(out);
        release(1, t - 1);
        share.sync();  // nobody reads weights of the tile before
        if (columns.outgrown == t) {
            restore_keys(p, tile, share, t, weights_at);
            issue_scores_from(weights_at);
            wgmma_wait<0>();
            pin(s);
            mask_padding(t);
            softmax.set_shifts<false>(s, share);  // its barrier: nobody reads restored keys
            softmax.rescale(out, share);
            pin(out);
            softmax.weigh<true>(weights, s, share);
        }
    }
    store_weights(weights_at, weights, share);
    share_weights(share.group);
    add_values_of(tiles - 1);
    combine_warp(softmax.sums, columns.parts[share.warp], share.lane, added);
    wgmma_wait<0>();
    pin(out);
    share.sync();  // nobody reads keys, values, queries or weights any more
    const int column = share.thread;
    if (column < kWideRows) {
        float sum = 0.f;
#pragma unroll
        for (int warp = 0; warp < 8; ++warp) sum += columns.parts[warp][column];
        columns.factor[column] = 1.f / sum;
        if (column < tile.rows) store_log_sum(p, tile, tile.first + column, sum, columns.shift[column]);
    }
    share.sync();
    store_wide_output<kBf16>(p, tile, share, out, columns, shared);
}

template <bool kBf16> __device__ __forceinline__ void attend_wide(const AttendParams& p) {
    extern __shared__ char dynamic[];
    char* shared = dynamic + (0u - shared_address(dynamic) & 1023u);
    const Tile tile(p, kWideRows);
    const WidePipeline pipeline{shared_address(shared)};
    share_work(p, tile, pipeline, 8, [&](const SeenTiles& seen, int group, int thread) {
        const WideShare share(tile, group, thread);
        attend_wide_queries<kBf16>(p, tile, pipeline, share, shared, seen.count);
    });
}

extern "C" {
__global__ void __launch_bounds__(512, 1) attend_wide_bf16(const __grid_constant__ AttendParams p) {
    attend_wide<true>(p);
}
__global__ void __launch_bounds__(512, 1) attend_wide_fp16(const __grid_constant__ AttendParams p) {
    attend_wide<false>(p);
}
}
