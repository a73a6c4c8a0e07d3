// Before and after the gradients' main kernel: how large a head's numbers are, operands into its layout, gradients of
// queries out.

constexpr int kParts = 32;  // of a head's tokens: a lane for each

struct BoundParams {
    PackParams pack;
    Tokens grad;
    float* part_bounds;        // [batch * heads, kParts, 2]
    int queries, head_groups;  // heads are packed by so many blocks of threads side by side
};

struct PackQueryParams {
    Tokens q, out, grad;
    const float* lse;          // [batch, heads, queries]
    const float* disparity;    // [tables, queries, 9]
    const float* rotation;     // [tables, queries, kOwnFloats]
    const float* native;       // [tables, queries, 16, 2]
    u16* packed_q;             // [batch * heads, 2 halves, cameras * padded rows, 64]
    u16* packed_grad;
    float2* rows;              // [batch * heads, cameras * padded rows]: what a score's exponent lacks, grad . out
    const float2* part_bounds;
    float2* bounds;            // [batch * heads]: see HeadScales
    float* sums;               // of GradParams: zeroed here
    i64 tables_per_sample;
    int heads, cameras, tokens_per_camera, padded_rows, queries;
};

struct FinishParams {
    Tokens grad_q;
    const float* sums;
    const float2* bounds;
    const float* disparity;
    const float* rotation;
    const float* native;
    i64 tables_per_sample;
    int heads, cameras, tokens_per_camera, padded_rows, queries;
    float scale;
};

// ---- a head's scales -----------------------------------------------------------------------------------------------
// Output gradients may have any magnitude, half precision has not. So they and the errors p (dP - D), D = grad . out,
// are multiplied by powers of two of their head, found from its largest norms |g| of an output gradient and |v| of a
// value:
//   grad    |g| < 2^14 afterwards
//   error   |g| |v| < 2^8 afterwards. Weights p carry 2^kWeightShift = 2^8 as in the forward pass. D is the mean of dP
//           under p, so that |p (dP - D)| <= 2 p (1 - p) |g| |v| <= |g| |v| / 2: errors stay below 2^15.

__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float(exponent + 127 << 23); }

struct HeadScales {
    int grad_exponent, error_exponent;
    __device__ __forceinline__ explicit HeadScales(float2 bounds) {
        auto exponent = [](float x) { return (__float_as_int(x) >> 23) - 127; };  // x < 2^(exponent + 1)
        grad_exponent = min(13 - exponent(bounds.x), 100);  // so that it can be undone in float32
        // Packed values saturate at 2^14 and vanish below 2^-25.
        error_exponent = -7 - min(max(exponent(bounds.y), -26), 17);
    }
    __device__ __forceinline__ float grad() const { return power_of_two(grad_exponent); }
    __device__ __forceinline__ float error() const { return power_of_two(error_exponent); }
    // What is left to multiply sums over weights and over errors with. In this order no product over- or underflows.
    __device__ __forceinline__ float undo_weights() const {
        return power_of_two(-(int)kWeightShift) * power_of_two(-grad_exponent);
    }
    __device__ __forceinline__ float undo_errors(float scale) const {
        return scale * power_of_two(-(int)kWeightShift - error_exponent) * power_of_two(-grad_exponent);
    }
};

// Norm of a row between 16 lanes, whatever its magnitude; NaN where a number is not finite.
__device__ __forceinline__ float row_norm(const float (&x)[8], u32 lanes) {
    float most = 1e-37f, sum = 0.f;  // not 0: it divides
#pragma unroll
    for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(x[i]));
#pragma unroll
    for (int lane = 8; lane; lane /= 2) most = fmaxf(most, __shfl_xor_sync(lanes, most, lane));
    const float inverse = 1.f / most;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(x[i] * inverse, x[i] * inverse, sum);
#pragma unroll
    for (int lane = 8; lane; lane /= 2) sum += __shfl_xor_sync(lanes, sum, lane);
    return most * sqrtf(sum);
}

// Positive floats are ordered as their bits.
__device__ __forceinline__ float warp_max(float x) {
    return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(x)));
}

// A block finds the largest norm in one part of a head's output gradients (operand 0) or values (1), 16 lanes a token.
template <bool kBf16> __device__ void bound_part(const BoundParams& p, int part, int head, int operand) {
    constexpr int kAtOnce = 4;
    const Tokens from = operand ? p.pack.v : p.grad;
    const int sample = blockIdx.y, tokens = operand ? p.pack.keys : p.queries;
    const int each = (tokens + kParts - 1) / kParts, end = min((part + 1) * each, tokens);
    const u16* rows = from.data + sample * from.batch + head * from.head + threadIdx.x % 16 * 8;
    float most = 0.f;
    for (int token = part * each + threadIdx.x / 16; token < end; token += 16 * kAtOnce) {
        uint4 w[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int one = token + 16 * i;
            w[i] = one < end ? __ldg((const uint4*)(rows + one * from.token)) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const u32 words[4] = {w[i].x, w[i].y, w[i].z, w[i].w};
            float x[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] = widen<kBf16>((u16)(words[j / 2] >> 16 * (j % 2)));
            // fmaxf passes over NaN: such rows spoil what they are added to, and not the others' scale.
            most = fmaxf(most, row_norm(x, 0xffffu << (threadIdx.x & 16)));
        }
    }
    __shared__ float of_warps[8];
    most = warp_max(most);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    most = warp_max(of_warps[threadIdx.x % 8]);
    const i64 pair = (i64)sample * p.pack.heads + head;
    if (threadIdx.x == 0) p.part_bounds[(pair * kParts + part) * 2 + operand] = most;
}

// Bounds and packed keys in one grid, part by part: values are read by both, the second time from the cache.
template <bool kBf16> __device__ void bound_and_pack(const BoundParams& p) {
    const int per_part = gridDim.x / kParts, bounding = 2 * p.pack.heads;
    const int part = blockIdx.x / per_part, within = blockIdx.x % per_part;
    if (within < bounding) return bound_part<kBf16>(p, part, within / 2, within % 2);
    const int packing = (per_part - bounding) / p.head_groups, index = within - bounding;
    pack_keys<kBf16>(p.pack, part * packing + index % packing, index / packing, p.head_groups);
}

// ---- into and out of the layout ------------------------------------------------------------------------------------

template <bool kBf16> __device__ void pack_queries(const PackQueryParams& p) {  // a thread per row, half and chunk
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = index / 16, sample = blockIdx.y, all = p.cameras * p.padded_rows;  // 16 rows a block, none is left
    const Chunk<false> chunk((index / 8) & 1, index & 7);
    const int camera = row / p.padded_rows, within = row % p.padded_rows;
    const bool padding = within >= p.tokens_per_camera;
    const int token = padding ? 0 : camera * p.tokens_per_camera + within;
    const i64 at = sample * p.tables_per_sample * p.queries + token;
    const TokenTurn<false> turn(chunk, query_operator(p, chunk, at), p.native + at * 32, true);
    __shared__ __align__(16) u32 staged[256 * 4];
    const SumOrder order(chunk, staged);
    for (int head = blockIdx.z; head < p.heads; head += gridDim.z) {
        const i64 pair = (i64)sample * p.heads + head;
        const float2 part = __ldg(p.part_bounds + pair * kParts + threadIdx.x % kParts);
        const float lse = __ldg(p.lse + pair * p.queries + token);
        float q[8] = {}, g[8] = {}, o[8] = {};
        if (!padding) {
            chunk.load<kBf16>(q, p.q.data + sample * p.q.batch + head * p.q.head + token * p.q.token);
            chunk.load<kBf16>(g, p.grad.data + sample * p.grad.batch + head * p.grad.head + token * p.grad.token);
            chunk.load<kBf16>(o, p.out.data + sample * p.out.batch + head * p.out.head + token * p.out.token);
        }
        float4* sums = (float4*)(p.sums + pair * all * 128) + blockIdx.x * 512 + threadIdx.x;  // the block's share
        sums[0] = sums[256] = make_float4(0.f, 0.f, 0.f, 0.f);
        const float2 bounds = make_float2(warp_max(part.x), warp_max(part.y));
        if (index == 0) p.bounds[pair] = bounds;
        const HeadScales scales(bounds);
        float dot = 0.f;
#pragma unroll
        for (int i = 0; i < 8; ++i) g[i] *= scales.grad(), dot += g[i] * o[i];
#pragma unroll
        for (int lane = 8; lane; lane /= 2) dot += __shfl_xor_sync(0xffffu << (threadIdx.x & 16), dot, lane);
        if ((index & 15) == 0)
            p.rows[pair * all + row] = padding ? make_float2(-infinity(), 0.f)
                                               : make_float2(kWeightShift - lse * kLog2E, dot * scales.error());
        turn.apply(q, chunk), turn.apply(g, chunk);
        const i64 to = ((pair * 2 + chunk.half) * all + row) * 64 + 8 * (chunk.c ^ (row & 7));
        __stwb((uint4*)(p.packed_q + to), order(packed(q)));
        __stwb((uint4*)(p.packed_grad + to), order(narrowed<false>(g)));
    }
}

// A row's chunk of 64 rows' sums, which lie as the tensor cores left them: thread, then element (see the softmax of
// hopper_forward.cu).
__device__ __forceinline__ void load_sums(
    float (&x)[8], const float* sums, const Chunk<false>& chunk, int row, float factor
) {
    const int thread = row / 16 * 32 + row % 8 * 4;
    const float* from = sums + thread * 4 + (row / 8 & 1) * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int place = sum_place(chunk.half, chunk.c, i);
        const float2 two = *(const float2*)(from + place / 4 * 512 + place % 4 * 4);
        x[2 * i] = factor * two.x, x[2 * i + 1] = factor * two.y;
    }
}

template <bool kBf16> __device__ void finish_queries(const FinishParams& p) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    const int token = index / 16, sample = blockIdx.y, all = p.cameras * p.padded_rows;
    if (token >= p.queries) return;
    const Chunk<false> chunk((index / 8) & 1, index & 7);
    const int row = token / p.tokens_per_camera * p.padded_rows + token % p.tokens_per_camera;
    const i64 at = sample * p.tables_per_sample * p.queries + token;
    const TokenTurn<false> turn(chunk, query_operator(p, chunk, at), p.native + at * 32, false);
    for (int head = blockIdx.z; head < p.heads; head += gridDim.z) {
        const i64 pair = (i64)sample * p.heads + head;
        const float* sums = p.sums + ((pair * (all / 64) + row / 64) * 2 + chunk.half) * 4096;
        float x[8];
        load_sums(x, sums, chunk, row % 64, HeadScales(__ldg(p.bounds + pair)).undo_errors(p.scale));
        turn.apply(x, chunk);
        u16* to = p.grad_q.data + sample * p.grad_q.batch + head * p.grad_q.head + token * p.grad_q.token;
        chunk.scatter(to, narrowed<kBf16>(x));
    }
}

extern "C" {
__global__ void __launch_bounds__(256) bound_and_pack_bf16(const __grid_constant__ BoundParams p) {
    bound_and_pack<true>(p);
}
__global__ void __launch_bounds__(256) bound_and_pack_fp16(const __grid_constant__ BoundParams p) {
    bound_and_pack<false>(p);
}
__global__ void __launch_bounds__(256, 3) pack_queries_bf16(const __grid_constant__ PackQueryParams p) {
    pack_queries<true>(p);
}
__global__ void __launch_bounds__(256, 3) pack_queries_fp16(const __grid_constant__ PackQueryParams p) {
    pack_queries<false>(p);
}
__global__ void __launch_bounds__(256) finish_queries_bf16(const __grid_constant__ FinishParams p) {
    finish_queries<true>(p);
}
__global__ void __launch_bounds__(256) finish_queries_fp16(const __grid_constant__ FinishParams p) {
    finish_queries<false>(p);
}
}
