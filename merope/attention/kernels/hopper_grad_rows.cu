// Before and after the gradients' main kernel: queries and output gradients into its layout, gradients of queries out.

struct PackQueryParams {
    Tokens q, out, grad;
    const float* lse;          // [batch, heads, queries]
    const float* disparity;    // [tables, queries, 9]
    const float* rotation;     // [tables, queries, 9]
    const float* native;       // [tables, queries, 16, 2]
    u16* packed_q;             // [batch * heads, 2 halves, cameras * padded rows, 64]
    u16* packed_grad;
    float2* rows;              // [batch * heads, cameras * padded rows]: log2 of the softmax sum, grad . out
    i64 tables_per_sample;
    int heads, cameras, tokens_per_camera, padded_rows, queries;
};

struct FinishParams {
    Tokens grad_q;
    const float* sums;
    const float* disparity;
    const float* rotation;
    const float* native;
    i64 tables_per_sample;
    int heads, cameras, tokens_per_camera, padded_rows, queries;
    float scale;
};

template <bool kBf16> __device__ void pack_queries(const PackQueryParams& p) {  // a thread per row, half and chunk
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = index / 16, sample = blockIdx.y, all = p.cameras * p.padded_rows;
    if (row >= all) return;
    const Chunk chunk((index / 8) & 1, index & 7);
    const int camera = row / p.padded_rows, within = row % p.padded_rows;
    const bool padding = within >= p.tokens_per_camera;
    const int token = padding ? 0 : camera * p.tokens_per_camera + within;
    const i64 at = sample * p.tables_per_sample * p.queries + token;
    const TokenTurn turn(chunk, (chunk.half ? p.rotation : p.disparity) + at * 9, p.native + at * 32, true);
    for (int head = 0; head < p.heads; ++head) {
        const i64 pair = (i64)sample * p.heads + head;
        float q[8] = {}, g[8] = {}, o[8] = {};
        if (!padding) {
            chunk.load<kBf16>(q, p.q.data + sample * p.q.batch + head * p.q.head + token * p.q.token);
            chunk.load<kBf16>(g, p.grad.data + sample * p.grad.batch + head * p.grad.head + token * p.grad.token);
            chunk.load<kBf16>(o, p.out.data + sample * p.out.batch + head * p.out.head + token * p.out.token);
        }
        float dot = 0.f;
#pragma unroll
        for (int i = 0; i < 8; ++i) dot += g[i] * o[i];
#pragma unroll
        for (int lane = 8; lane; lane /= 2) dot += __shfl_xor_sync(0xffffu << (threadIdx.x & 16), dot, lane);
        if ((index & 15) == 0)
            p.rows[pair * all + row] = padding ? make_float2(infinity(), 0.f)
                                               : make_float2(p.lse[pair * p.queries + token] * kLog2E, dot);
        turn.apply(q, chunk), turn.apply(g, chunk);
        const i64 to = ((pair * 2 + chunk.half) * all + row) * 64 + 8 * (chunk.c ^ (row & 7));
        *(uint4*)(p.packed_q + to) = narrowed<kBf16>(q);
        *(uint4*)(p.packed_grad + to) = narrowed<kBf16>(g);
    }
}

template <bool kBf16> __device__ void finish_queries(const FinishParams& p) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    const int token = index / 16, sample = blockIdx.y, all = p.cameras * p.padded_rows;
    if (token >= p.queries) return;
    const Chunk chunk((index / 8) & 1, index & 7);
    const int row = token / p.tokens_per_camera * p.padded_rows + token % p.tokens_per_camera;
    const i64 at = sample * p.tables_per_sample * p.queries + token;
    const TokenTurn turn(chunk, (chunk.half ? p.rotation : p.disparity) + at * 9, p.native + at * 32, false);
    // Sums lie as the tensor cores left them: thread, then element (see the softmax of hopper_forward.cu).
    const int r = row % 64, thread = r / 16 * 32 + r % 8 * 4;
    for (int head = 0; head < p.heads; ++head) {
        const i64 pair = (i64)sample * p.heads + head;
        const float* from = p.sums + ((pair * (all / 64) + row / 64) * 2 + chunk.half) * 4096
                            + (chunk.c * 128 + thread) * 4 + (r / 8 & 1) * 2;
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = p.scale * from[i / 2 * 4 + i % 2];
        turn.apply(x, chunk);
        u16* to = p.grad_q.data + sample * p.grad_q.batch + head * p.grad_q.head + token * p.grad_q.token;
        chunk.scatter(to, narrowed<kBf16>(x));
    }
}

extern "C" {
__global__ void __launch_bounds__(256) pack_queries_bf16(const __grid_constant__ PackQueryParams p) {
    pack_queries<true>(p);
}
__global__ void __launch_bounds__(256) pack_queries_fp16(const __grid_constant__ PackQueryParams p) {
    pack_queries<false>(p);
}
__global__ void __launch_bounds__(256) finish_queries_bf16(const __grid_constant__ FinishParams p) {
    finish_queries<true>(p);
}
__global__ void __launch_bounds__(256) finish_queries_fp16(const __grid_constant__ FinishParams p) {
    finish_queries<false>(p);
}
}
