// MeRoPE's attention: keys and values are turned into the query camera's view inside the loop.
//
// Two kernels. `pack_keys` applies what factors per token (native block, and rotations where directions have no phases)
// to keys and values once, in half precision and in the order of hopper_channels.cuh. `attend` is flash attention over tiles of 128 queries of one
// camera and 128 keys, by four warpgroups of 128 threads:
//   0, 1  64 queries each: scores, softmax and weighted values (wgmma), taking turns on the tensor cores;
//   2     turns the 60 channels that depend on the query's camera, in place in shared memory, one key a thread;
//   3     one thread of it copies packed tiles to shared memory; with direction phases, three warps of it turn 36
//         channels more.
// Half precision inside, whatever the input's type: 11 bits where bfloat16 has 8, and packed arithmetic that makes a
// turned key cost 60 instructions. Numbers beyond ±16384 saturate. Sums are float32 throughout.

constexpr int kRows = 128;   // queries of a tile, all of one camera
constexpr int kStages = 3;   // tiles in flight: being copied, turned, used
constexpr u32 kQueryBytes = 64 * 256;  // of one warpgroup
constexpr u32 kTilesOffset = 2 * kQueryBytes;
constexpr u32 kBarrierOffset = kTilesOffset + 2 * kStages * kTileBytes;
using Pipeline = PipelineOf<kStages, kTilesOffset, kBarrierOffset>;

// ---- softmax attention of 64 queries -------------------------------------------------------------------------------
// A thread holds two of its warp's 16 rows, lane / 4 + 8r: element 4i + 2r + j is column 8i + 2 (lane % 4) + j. The
// quad of lanes with the same lane / 4 holds a row between them.

// Weights are 2^(score scale_log2 + shift). The first tile sets the shift by its largest score. Later tiles keep it as
// long as their weights fit half precision, which their sums tell: looking for the largest of 128 scores takes a fifth of
// the softmax's instructions.

constexpr float kMostWeight = 32768.f;  // of a thread's sums, so of all its weights

struct Softmax {
    float shift[2], sum[2], rescale[2];

    // By the largest score. kFirst: of the first tile; others may only lower the shift.
    template <bool kFirst> __device__ __forceinline__ void weigh_by_largest(float (&s)[64], float scale_log2) {
        float high[2][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) high[i / 2][i % 2] = s[i];
#pragma unroll
        for (int i = 4; i < 64; ++i) high[i / 2 % 2][i % 2] = fmaxf(high[i / 2 % 2][i % 2], s[i]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float m = quad_largest(fmaxf(high[r][0], high[r][1]));
            const float own = kWeightShift - m * scale_log2, lower = kFirst ? own : fminf(shift[r], own);
            rescale[r] = kFirst ? 0.f : exp2_fast(lower - shift[r]);
            shift[r] = lower;
        }
        float sums[2];
        to_powers(s, scale_log2, sums);
#pragma unroll
        for (int r = 0; r < 2; ++r) sum[r] = (kFirst ? 0.f : sum[r] * rescale[r]) + sums[r];
    }
    // By the shift as it is. False for the whole warp: a weight left float32's range, and the scores are lost.
    __device__ __forceinline__ bool weigh(float (&s)[64], float scale_log2) {
        float sums[2];
        to_powers(s, scale_log2, sums);
        rescale[0] = rescale[1] = 1.f;
        if (__any_sync(~0u, !(sums[0] <= kMostWeight && sums[1] <= kMostWeight))) {
            if (__any_sync(~0u, !(sums[0] < infinity() && sums[1] < infinity()))) return false;
            lower_shift(s, sums);
        }
        sum[0] += sums[0], sum[1] += sums[1];
        return true;
    }
    // By a power of two, which rounds nothing, so that the largest sum of a quad lies between 2^8 and 2^9.
    __device__ __forceinline__ void lower_shift(float (&s)[64], float (&sums)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float top = quad_largest(sums[r]);
            const int down = top > kMostWeight ? (int)(__float_as_uint(top) >> 23) - 127 - (int)kWeightShift : 0;
            rescale[r] = __int_as_float(127 - down << 23);
            shift[r] -= (float)down, sum[r] *= rescale[r], sums[r] *= rescale[r];
        }
#pragma unroll
        for (int i = 0; i < 64; ++i) s[i] *= rescale[i / 2 % 2];
    }
    __device__ __forceinline__ void to_powers(float (&s)[64], float scale_log2, float (&sums)[2]) const {
        float parts[2][2] = {};
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            s[i] = exp2_fast(fmaf(s[i], scale_log2, shift[i / 2 % 2]));
            parts[i / 2 % 2][i % 2] += s[i];
        }
        sums[0] = parts[0][0] + parts[0][1], sums[1] = parts[1][0] + parts[1][1];
    }
    static __device__ __forceinline__ float quad_largest(float x) {
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
        return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
    }
    __device__ __forceinline__ void rescale_output(float (&out)[64]) const {
        if (!__any_sync(~0u, rescale[0] != 1.f || rescale[1] != 1.f)) return;
#pragma unroll
        for (int i = 0; i < 64; ++i) out[i] *= rescale[i / 2 % 2];
    }
    __device__ __forceinline__ void add_quad() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
            sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        }
    }
};
__device__ __forceinline__ void mask_keys(float (&s)[64], int left, int lane) {
#pragma unroll
    for (int i = 0; i < 64; ++i)
        if (8 * (i / 4) + 2 * (lane & 3) + i % 2 >= left) s[i] = -infinity();
}
// Only keys of two intervals have a weight. `first` is the first key of the tile.
__device__ __forceinline__ void mask_unseen(float (&s)[64], const int4& keys, int first, int lane) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        const int key = first + 8 * (i / 4) + 2 * (lane & 3) + i % 2;
        if ((key < keys.x || key >= keys.y) && (key < keys.z || key >= keys.w)) s[i] = -infinity();
    }
}
__device__ __forceinline__ void mask_tile(
    float (&s)[64], const AttendParams& p, int camera, const SeenTiles& seen, int t, int lane
) {
    if (!seen.is_edge(t)) return;
    if (kVisible) mask_unseen(s, __ldg(p.seen + camera), seen.at(t) * kKeys, lane);
    else mask_keys(s, p.keys - t * kKeys, lane);
}
__device__ __forceinline__ void to_weights(u32 (&weights)[32], const float (&s)[64]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) weights[i] = narrow_pair<false>(s[2 * i], s[2 * i + 1]);
}

struct Share : Rows<64, 128> {  // 64 of a tile's queries, for one warpgroup
    int group, lane;
    __device__ __forceinline__ Share(const Tile& tile, int group, int thread)
        : Rows{thread, tile.first + 64 * group, min(64, tile.rows - 64 * group), 3 + group}, group(group),
          lane(thread & 31) {}
    __device__ __forceinline__ int row_of_quad(int r) const { return thread / 32 * 16 + lane / 4 + 8 * r; }
};

template <bool kBf16>
__device__ __forceinline__ void store_output(
    const AttendParams& p, const Tile& tile, const Share& share, const float (&out)[64], const Softmax& softmax,
    char* own
) {
    const float factor[2] = {1.f / softmax.sum[0], 1.f / softmax.sum[1]};
    float* staged = (float*)own;  // over the queries
    uint4 words[2][Share::turns()];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        share.sync();
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int r = i % 2, at = 32 * half + 2 * i;
            *(float2*)(staged + staged_chunk(share.row_of_quad(r), i / 2) + 2 * (share.lane & 3)) =
                make_float2(out[at] * factor[r], out[at + 1] * factor[r]);
        }
        share.sync();
        turn_outputs<kBf16>(p, tile, share, staged, Chunk<true>(half, share.thread & 7), words[half]);
    }
    share.sync();
#pragma unroll
    for (int half = 0; half < 2; ++half) scatter_outputs(share, Chunk<true>(half, share.thread & 7), words[half], own);
    share.sync();
    store_outputs(p, tile, share, own);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = share.row_of_quad(r);
        if (share.lane % 4 == 0 && row < share.rows)
            store_log_sum(p, tile, share.first + row, softmax.sum[r], softmax.shift[r]);
    }
}

// The last channels of a warpgroup's queries, 16 a step, in registers: the tensor cores read so much less from shared
// memory. With direction phases registers are short, and it gained nothing.
constexpr int kHeldSteps = 4 - 4 * kPhases;

struct HeldQueries {
    u32 words[kHeldSteps ? 4 * kHeldSteps : 1];
    __device__ __forceinline__ void load(const char* own, const Share& share) {
        const int row = share.thread / 32 * 16 + share.lane % 16;
#pragma unroll
        for (int i = 0; i < kHeldSteps; ++i) {
            const int chunk = 2 * (4 - kHeldSteps + i) + share.lane / 16;  // of half 1
            load_matrices(words + 4 * i, shared_address(own + kQueryBytes / 2 + row * 128 + ((chunk ^ (row & 7)) << 4)));
        }
    }
};
// scores[64 queries, 128 keys] = queries keys^T
__device__ __forceinline__ void issue_scores(float (&scores)[64], u32 queries, const HeldQueries& held, u32 keys) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // 16 channels at a time
        const u64 b = descriptor(keys + i / 4 * kHalfBytes + i % 4 * 32);
        if (i < 8 - kHeldSteps) {
            const u64 a = descriptor(queries + i / 4 * (kQueryBytes / 2) + i % 4 * 32);
            multiply<false, false>(scores, a, b, i > 0);
        } else {
            multiply_add<false>(scores, held.words + 4 * (i + kHeldSteps - 8), b);
        }
    }
    wgmma_commit();
}

// out[64 queries, 128 channels] += weights values; weights in registers
__device__ __forceinline__ void issue_values(float (&out)[64], const u32 (&weights)[32], u32 values) {
#pragma unroll
    for (int i = 0; i < 8; ++i)  // 16 keys at a time
        multiply_add<true>(out, weights + 4 * i, descriptor(values + i * 2048, kHalfBytes));
    wgmma_commit();
}

// The same scores once more, by one warp for its 16 queries: other warps of its group may not need theirs.
__device__ __forceinline__ void multiply_again(float (&scores)[64], u32 queries, u32 keys, const Share& share) {
    const int row = share.thread / 32 * 16 + share.lane % 16, key = share.lane % 8;
#pragma unroll
    for (int i = 0; i < 64; ++i) scores[i] = 0.f;
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {  // 16 channels at a time
        const u32 chunk = 2 * (i % 4);
        u32 a[4], b[4];
        load_matrices(a, queries + i / 4 * (kQueryBytes / 2) + row * 128 + ((chunk + share.lane / 16 ^ row & 7) << 4));
#pragma unroll
        for (int j = 0; j < 16; j += 2) {  // 8 keys at a time
            const u32 keys_row = keys + i / 4 * kHalfBytes + (8 * (j + share.lane / 16) + key) * 128;
            load_matrices(b, keys_row + ((chunk + share.lane / 8 % 2 ^ key) << 4));
            multiply_warp(scores + 4 * j, a, b);
            multiply_warp(scores + 4 * j + 4, a, b + 2);
        }
    }
}

template <bool kBf16>
__device__ __forceinline__ void attend_queries(
    const AttendParams& p, const Tile& tile, const Pipeline& pipeline, const Share& share, char* shared,
    const SeenTiles& seen
) {
    const int tiles = seen.count;
    const bool paired = tile.rows > 64;  // both warpgroups have queries
    const float scale_log2 = p.scale * kLog2E;
    char* own = shared + share.group * kQueryBytes;
    const u32 queries = shared_address(own);
    load_queries<kBf16>(p, tile, share, own);
    fence_async_proxy();
    share.sync();
    auto ready = [&](int operand, int t) { pipeline.wait_until_turned(operand, t); };
    auto release = [&](int operand, int t) {
        if (share.lane == 0) barrier_arrive(pipeline.used(operand, t));
    };
    HeldQueries held;
    held.load(own, share);
    float s[64], out[64] = {};
    u32 weights[32];
    Softmax softmax;
    if (paired && share.group == 1) named_arrive<256>(1);  // warpgroup 0 goes first
    ready(0, 0);
    wgmma_fence();
    issue_scores(s, queries, held, pipeline.tile(0, 0));
    wgmma_wait<0>();
    pin(s);
    release(0, 0);
    mask_tile(s, p, tile.camera, seen, 0, share.lane);
    softmax.weigh_by_largest<true>(s, scale_log2);
    to_weights(weights, s);
#pragma unroll 1
    for (int t = 1; t < tiles; ++t) {
        ready(0, t);
        if (paired) named_sync<256>(1 + share.group);
        pin(s), pin(out), pin(weights);
        if (kHeldSteps) pin(held.words);
        wgmma_fence();
        issue_scores(s, queries, held, pipeline.tile(0, t));
        ready(1, t - 1);
        wgmma_fence();
        issue_values(out, weights, pipeline.tile(1, t - 1));
        if (paired && !(share.group == 1 && t == tiles - 1)) named_arrive<256>(2 - share.group);
        wgmma_wait<1>();
        pin(s);
        mask_tile(s, p, tile.camera, seen, t, share.lane);
        if (!softmax.weigh(s, scale_log2)) {
            multiply_again(s, queries, pipeline.tile(0, t), share);
            mask_tile(s, p, tile.camera, seen, t, share.lane);
            softmax.weigh_by_largest<false>(s, scale_log2);
        }
        release(0, t);
        wgmma_wait<0>();
        release(1, t - 1);
        pin(out);
        softmax.rescale_output(out);
        to_weights(weights, s);
    }
    ready(1, tiles - 1);
    pin(out), pin(weights);
    wgmma_fence();
    issue_values(out, weights, pipeline.tile(1, tiles - 1));
    softmax.add_quad();
    wgmma_wait<0>();
    pin(out);
    store_output<kBf16>(p, tile, share, out, softmax, own);
}

template <bool kBf16> __device__ __forceinline__ void attend(const AttendParams& p) {
    extern __shared__ char dynamic[];
    char* shared = dynamic + (0u - shared_address(dynamic) & 1023u);
    const Tile tile(p, kRows);
    const Pipeline pipeline{shared_address(shared)};
    share_work(p, tile, pipeline, tile.rows > 64 ? 8 : 4, [&](const SeenTiles& seen, int group, int thread) {
        const Share share(tile, group, thread);
        if (share.rows > 0) attend_queries<kBf16>(p, tile, pipeline, share, shared, seen);
    });
}

extern "C" {
__global__ void __launch_bounds__(512, 1) attend_bf16(const __grid_constant__ AttendParams p) { attend<true>(p); }
__global__ void __launch_bounds__(512, 1) attend_fp16(const __grid_constant__ AttendParams p) { attend<false>(p); }
}
