// Gradients of MeRoPE's attention. `bound_and_pack` finds how large a head's numbers are, it and `pack_queries` apply
// what factors per token and lay out operands, `gradients` does the work, `finish_queries` takes the queries' gradients
// out of their layout, `finish_keys` those of keys that blocks of threads share.
//
// A block of 128 keys walks over all queries of its head, camera by camera, 64 queries a step. When the camera changes,
// its keys and values are turned anew from the packed ones (in shared memory, too), and so are the sums of their
// gradients, in registers: these are always in the view of the current camera. Gradients of queries are added up in
// memory by bulk reductions. Blocks of a last wave share tiles: each has some of a tile's cameras (KeyPiece).
// Three warpgroups: 0 and 1 own 64 keys each; one thread of 2 copies queries and output gradients to shared memory.
// Operands are in half precision, and queries, keys and values bit for bit those of the forward pass, in another order
// of channels (sum_place): scores computed anew then agree with its log-sum-exp but for float32's rounding of a sum.
// Output gradients get half precision's range by a scale of their head (HeadScales in hopper_grad_rows.cu).

constexpr u32 kStepHalf = kStepBytes / 2;
constexpr u32 kGradKeys = 0;
constexpr u32 kGradValues = kTileBytes;
constexpr u32 kStepQueries = 2 * kTileBytes;                    // two stages
constexpr u32 kStepGrads = kStepQueries + 2 * kStepBytes;       // two stages
constexpr u32 kStepErrors = kStepGrads + 2 * kStepBytes;        // two, so that one may still be read
constexpr u32 kStepSums = kStepErrors + 2 * kStepBytes;         // one for each warpgroup
constexpr u32 kPacked = kStepSums + 2 * kStepBytes;             // half 0 of keys, then of values, as they were packed
constexpr u32 kStepRows = kPacked + 2 * kHalfBytes;             // two stages of 64 float2
constexpr u32 kErrorScale = kStepRows + 2 * 512;                // of the head: not in a register, they are all taken
constexpr u32 kStepBarriers = kErrorScale + 8;

// ---- tensor cores -------------------------------------------------------------------------------------------------

// [64 own keys, 64 queries] = keys queries^T
__device__ __forceinline__ void issue_products(float (&d)[32], u32 own_keys, u32 queries) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u64 a = descriptor(own_keys + i / 4 * kHalfBytes + i % 4 * 32);
        const u64 b = descriptor(queries + i / 4 * kStepHalf + i % 4 * 32);
        multiply<false, false>(d, a, b, i > 0);
    }
    wgmma_commit();
}
// [64 own keys, 128 channels] += w rows, w[64 own keys, 64 queries] in registers
__device__ __forceinline__ void issue_key_sums(float (&d)[64], const u32 (&w)[16], u32 rows) {
#pragma unroll
    for (int i = 0; i < 4; ++i) multiply_add<true>(d, w + 4 * i, descriptor(rows + i * 2048, kStepHalf));
    wgmma_commit();
}
// [64 queries, 64 channels of one half] = errors^T keys
__device__ __forceinline__ void issue_query_sums(float (&d)[32], u32 errors, u32 keys_half) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
        multiply<true, true>(d, descriptor(errors + i * 2048), descriptor(keys_half + i * 2048), i > 0);
    wgmma_commit();
}

__device__ __forceinline__ CameraTables camera_tables(const GradParams& p, i64 tables, int camera, int tile) {
    const i64 at = tables * p.cameras + camera;
    const u32* key_views = p.key_views + at * kViewWords * p.padded_keys + (i64)tile * kViewWords * kKeys;
    return {key_views, p.phasors + at * p.key_cameras * 3};
}

// ---- over the queries ---------------------------------------------------------------------------------------------

struct Walk {  // every block of keys starts with another camera, so that they add to different gradients of queries
    int steps_per_camera, turns, first_camera, cameras;  // of `cameras`, this block has so many turns
    const int* seen_by;  // the cameras, with kVisible
    __device__ __forceinline__ int steps() const { return steps_per_camera * turns; }
    __device__ __forceinline__ int camera(int step) const {
        const int turn = step / steps_per_camera;
        return kVisible ? __ldg(seen_by + turn) : (first_camera + turn) % cameras;
    }
    __device__ __forceinline__ int place(int step) const {
        return camera(step) * steps_per_camera + step % steps_per_camera;
    }
};
enum { kQueriesHere = 0, kGradsHere = 2, kQueriesUsed = 4, kGradsUsed = 6, kTileHere = 8 };  // barriers, of two stages

__device__ __forceinline__ void copy_steps(
    const GradParams& p, const Walk& walk, i64 pair, int tile, u32 base, u32 barriers
) {
    const i64 all = (i64)p.cameras * p.padded_rows;
    barrier_expect(barriers + 8 * kTileHere, 4 * kHalfBytes);
    const i64 half = pair * 2 * p.padded_keys * 64 + (i64)tile * kKeys * 64;
    const i64 other = half + (i64)p.padded_keys * 64;  // never turns
    copy_bulk(base + kPacked, p.packed_k + half, kHalfBytes, barriers + 8 * kTileHere);
    copy_bulk(base + kPacked + kHalfBytes, p.packed_v + half, kHalfBytes, barriers + 8 * kTileHere);
    copy_bulk(base + kGradKeys + kHalfBytes, p.packed_k + other, kHalfBytes, barriers + 8 * kTileHere);
    copy_bulk(base + kGradValues + kHalfBytes, p.packed_v + other, kHalfBytes, barriers + 8 * kTileHere);
    const int tables = (int)pair / p.heads * (int)p.tables_per_sample;  // a 64-bit division takes too many registers
    for (int step = 0; step < walk.steps(); ++step) {
        const int stage = step & 1;
        const u32 parity = (step / 2 - 1) & 1;
        const i64 row = (i64)walk.place(step) * 64, at = (pair * 2 * all + row) * 64;
        const u32 queries_here = barriers + 8 * (kQueriesHere + stage);
        const u32 grads_here = barriers + 8 * (kGradsHere + stage);
        const u32 queries_to = base + kStepQueries + stage * kStepBytes;
        const u32 grads_to = base + kStepGrads + stage * kStepBytes;
        if (step >= 2) barrier_wait(barriers + 8 * (kQueriesUsed + stage), parity);
        barrier_expect(queries_here, kStepBytes);
        copy_bulk(queries_to, p.packed_q + at, kStepHalf, queries_here);
        copy_bulk(queries_to + kStepHalf, p.packed_q + at + all * 64, kStepHalf, queries_here);
        if (step >= 2) barrier_wait(barriers + 8 * (kGradsUsed + stage), parity);
        barrier_expect(grads_here, kStepBytes + 512);
        copy_bulk(grads_to, p.packed_grad + at, kStepHalf, grads_here);
        copy_bulk(grads_to + kStepHalf, p.packed_grad + at + all * 64, kStepHalf, grads_here);
        copy_bulk(base + kStepRows + stage * 512, p.rows + pair * all + row, 512, grads_here);
        if (step % walk.steps_per_camera) continue;
        const int next_camera = walk.camera(step + walk.steps_per_camera);
        const CameraTables next = camera_tables(p, tables, next_camera, tile);
        prefetch_bulk(next.key_views, kViewWords * kKeys * 4);
        prefetch_bulk(next.phasors, p.key_cameras * 48);
    }
}

// Padding has no weight. Its score of 0 may lie far above the log-sum-exp, and infinity times a key of 0 is NaN.
__device__ __forceinline__ void mask_own_keys(float (&s)[32], const int (&rows)[2], int keys_left) {
#pragma unroll
    for (int i = 0; i < 32; ++i)
        if (rows[i / 2 % 2] >= keys_left) s[i] = -infinity();
}

// Which of a thread's two keys a query camera does not see, a bit for each.
__device__ __forceinline__ u32 unseen_rows(const int4& seen, int first_key, const int (&rows)[2]) {
    auto unseen = [&](int key) { return (key < seen.x || key >= seen.y) && (key < seen.z || key >= seen.w); };
    return unseen(first_key + rows[0]) | unseen(first_key + rows[1]) << 1;
}
__device__ __forceinline__ void mask_unseen_rows(float (&s)[32], u32 unseen) {
#pragma unroll
    for (int i = 0; i < 32; ++i)
        if (unseen >> i / 2 % 2 & 1) s[i] = -infinity();
}

template <bool kBf16>
__device__ __forceinline__ void walk_queries(
    const GradParams& p, const Walk& walk, i64 pair, int tile, char* shared, u32 barriers, int group, int thread
) {
    const u32 base = shared_address(shared);
    const int lane = thread & 31;
    const int tables = (int)pair / p.heads * (int)p.tables_per_sample;
    const float scale_log2 = p.scale * kLog2E;
    const int rows[2] = {group * 64 + thread / 32 * 16 + lane / 4, group * 64 + thread / 32 * 16 + lane / 4 + 8};
    auto camera_of = [&](int row) { return __ldg(p.key_camera + tile * kKeys + row); };
    const int row_cameras[2] = {camera_of(rows[0]), camera_of(rows[1])};
    const u32 own_keys = base + kGradKeys + group * 64 * 128, own_values = base + kGradValues + group * 64 * 128;
    char* own_sums = shared + kStepSums + group * kStepBytes;
    const int keys_left = p.keys - tile * kKeys;
    const bool padded = keys_left < kKeys;
    TurnedRow turned;  // 64 own keys and values, one row a thread
    auto load_row = [&](int camera) {
        const int row = group * 64 + thread % 64;
        const char* from = shared + kPacked + (thread < 64 ? 0 : kHalfBytes) + row * 128;
        const CameraTables view = camera_tables(p, tables, camera, tile);
        turned.turn.load_half_vectors(view.key_views + 4 * row, row);
        turned.turn.load_phasors(view.phasors + 3 * camera_of(row));
        turned.load((const uint4*)from, row & 7);
    };
    auto tile_row = [&](u32 half) {
        const int row = group * 64 + thread % 64;
        return (uint4*)(shared + (thread < 64 ? kGradKeys : kGradValues) + half * kHalfBytes + row * 128);
    };
    TurnedDirections turned_directions;
    auto load_directions = [&](int camera) {  // packed keys anew from the cache: shared memory has no room for them
        const int row = group * 64 + thread % 64;
        const i64 at = (pair * 2 + 1) * p.padded_keys + tile * kKeys + row;
        const uint4* from = (const uint4*)((thread < 64 ? p.packed_k : p.packed_v) + at * 64);
        turned_directions.load(from, row & 7, camera_tables(p, tables, camera, tile).key_views + 4 * row);
    };
    auto publish = [&]() {
        fence_async_proxy();
        named_sync<256>(5);
    };
    float dk[64] = {}, dv[64] = {};
    u32 weights[16], errors[16];
    barrier_wait(barriers + 8 * kTileHere, 0);
    int step = 0;
#pragma unroll 1
    for (int turns_left = walk.turns; turns_left > 0; --turns_left) {
        const int camera = walk.camera(step);
        const CameraTables view = camera_tables(p, tables, camera, tile);
        const u32 unseen = kVisible ? unseen_rows(__ldg(p.seen + camera), tile * kKeys, rows) : 0;
        if (step) {
            const CameraTables last_view = camera_tables(p, tables, walk.camera(step - 1), tile);
            SumTurns<2> turns;
            turns.load(0, last_view, rows, row_cameras, lane & 3);
            turns.load(1, view, rows, row_cameras, lane & 3);
            load_row(camera);  // in this branch, too: the compiler then starts its loads while sums turn
            turns.apply(dk, dv, {-1.f, 1.f}, lane & 3);
            named_sync<256>(1);  // nobody reads the tile in the last camera's view any more
        } else {
            load_row(camera);
        }
        turned.store(tile_row(0), thread & 7);
        if (kPhases) {
            load_directions(camera);
            if (step) {
                DirectionSumTurns<2> turns;
                turns.load(0, camera_tables(p, tables, walk.camera(step - 1), tile), rows, lane & 3);
                turns.load(1, view, rows, lane & 3);
                turns.apply(dk, dv, {-1.f, 1.f}, lane & 3);
            }
            turned_directions.store(tile_row(1), thread & 7);
        }
        publish();
        float s[32] = {}, d[32] = {};  // not before: their registers hold what turns
        barrier_wait(barriers + 8 * (kQueriesHere + (step & 1)), step / 2 & 1);
        pin(s), pin(d), pin(dk), pin(dv);
        wgmma_fence();
        issue_products(s, own_keys, base + kStepQueries + (step & 1) * kStepBytes);
        wgmma_wait<0>();
        pin(s);
#pragma unroll 1
        for (int left = walk.steps_per_camera; left > 0; --left, ++step) {
            const int stage = step & 1;
            const u32 parity = step / 2 & 1;
            const u32 queries = base + kStepQueries + stage * kStepBytes;
            const u32 grads = base + kStepGrads + stage * kStepBytes;
            char* own_errors = shared + kStepErrors + stage * kStepBytes;
            const float4* stats = (const float4*)(shared + kStepRows + stage * 512);
            barrier_wait(barriers + 8 * (kGradsHere + stage), parity);
            pin(d);
            wgmma_fence();
            issue_products(d, own_values, grads);
            if (kVisible && __any_sync(~0u, unseen)) mask_unseen_rows(s, unseen);
            if (!kVisible && padded) mask_own_keys(s, rows, keys_left);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float4 two = stats[4 * i + (lane & 3)];  // `rows` of two queries
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float &a = s[4 * i + 2 * r], &b = s[4 * i + 2 * r + 1];
                    a = exp2_fast(fmaf(a, scale_log2, two.x));
                    b = exp2_fast(fmaf(b, scale_log2, two.z));
                    weights[2 * i + r] = narrow_pair<false>(a, b);
                }
            }
            wgmma_wait<0>();
            pin(d);
            const float error_scale = *(const float*)(shared + kErrorScale);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float4 two = stats[4 * i + (lane & 3)];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int at = 4 * i + 2 * r;
                    const float a = s[at] * fmaf(d[at], error_scale, -two.y);
                    const float b = s[at + 1] * fmaf(d[at + 1], error_scale, -two.w);
                    errors[2 * i + r] = narrow_pair<false>(a, b);
                    char* row = own_errors + rows[r] * 128;
                    *(u32*)(row + ((i ^ (rows[r] & 7)) << 4) + (lane & 3) * 4) = errors[2 * i + r];
                }
            }
            fence_async_proxy();
            pin(s), pin(d), pin(dv), pin(dk), pin(weights), pin(errors);
            wgmma_fence();
            issue_key_sums(dv, weights, grads);
            issue_key_sums(dk, errors, queries);
            named_sync<256>(1);  // the errors of both warpgroups are there
            float dq[32];
            issue_query_sums(dq, base + kStepErrors + stage * kStepBytes, base + kGradKeys + group * kHalfBytes);
            wgmma_wait<1>();
            if (lane == 0) {
                barrier_arrive(barriers + 8 * (kQueriesUsed + stage));
                barrier_arrive(barriers + 8 * (kGradsUsed + stage));
            }
            // After a camera's last step the product is not used; issued all the same, the pipeline stays one piece.
            if (left > 1) barrier_wait(barriers + 8 * (kQueriesHere + (stage ^ 1)), (step + 1) / 2 & 1);
            issue_products(s, own_keys, base + kStepQueries + (stage ^ 1) * kStepBytes);
            wgmma_wait<1>();
            pin(dq);
            stage_sums(dq, 0, own_sums, group, thread);
            if (thread == 0) {
                const int all_steps = p.cameras * p.padded_rows / 64;
                const int place = kVisible ? (camera + 1) * walk.steps_per_camera - left : walk.place(step);
                float* to = p.sums + ((pair * all_steps + place) * 2 + group) * 4096;
                add_bulk(to, base + kStepSums + group * kStepBytes, kStepBytes);
            }
            wgmma_wait<0>();
            pin(s);
        }
        pin(dk), pin(dv);
    }
    const bool unturned = kVisible && !step;  // nobody sees these keys: their gradients are zero
    if (!unturned) {
        SumTurns<1> turns;
        turns.load(0, camera_tables(p, tables, walk.camera(step - 1), tile), rows, row_cameras, lane & 3);
        turns.apply(dk, dv, {-1.f}, lane & 3);
    }
    if (kPhases && !unturned) {
        DirectionSumTurns<1> direction_turns;
        direction_turns.load(0, camera_tables(p, tables, walk.camera(step - 1), tile), rows, lane & 3);
        direction_turns.apply(dk, dv, {-1.f}, lane & 3);
    }
    const int cut_tile = (int)pair * (p.padded_keys / kKeys) + tile - p.whole_tiles;
    if (!kVisible && cut_tile >= 0) {
        const u32 staged_at = base + kStepSums + group * kStepBytes;
        return add_key_sums(p, dk, dv, cut_tile, own_sums, staged_at, group, thread);
    }
    if (thread == 0) wait_until_added();
    const int sample = pair / p.heads, head = pair % p.heads, first_key = tile * kKeys + group * 64;
    const HeadScales scales(__ldg(p.bounds + pair));
    const float for_keys = scales.undo_errors(p.scale), for_values = scales.undo_weights();
    store_key_sums<kBf16>(p, p.grad_k, dk, for_keys, (float*)own_sums, sample, head, first_key, group, thread);
    store_key_sums<kBf16>(p, p.grad_v, dv, for_values, (float*)own_sums, sample, head, first_key, group, thread);
}

template <bool kBf16> __device__ __forceinline__ void gradients(const GradParams& p) {
    extern __shared__ char dynamic[];
    char* shared = dynamic + (0u - shared_address(dynamic) & 1023u);
    const u32 base = shared_address(shared), barriers = base + kStepBarriers;
    const KeyPiece piece(p);
    const int tiles = p.padded_keys / kKeys, index = piece.tile % tiles;
    const i64 pair = piece.tile / tiles;
    const int* seen_by = p.walks + index * (3 + p.cameras);
    const int tile = kVisible ? __ldg(seen_by) : index, turns = kVisible ? __ldg(seen_by + 1) : piece.turns;
    const int first_camera = kVisible ? 0 : (tile + piece.first_turn) % p.cameras;
    const Walk walk{p.padded_rows / 64, turns, first_camera, p.cameras, seen_by + 2};
    if (threadIdx.x == 0) {
        for (int i = 0; i < 4; ++i) barrier_init(barriers + 8 * i, 1), barrier_init(barriers + 8 * (4 + i), 8);
        barrier_init(barriers + 8 * kTileHere, 1);
        *(float*)(shared + kErrorScale) = HeadScales(__ldg(p.bounds + pair)).error();
        fence_barriers();
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), thread = threadIdx.x % 128;
    if (group == 2) {
        give_registers<24>();
        if (thread == 0) copy_steps(p, walk, pair, tile, base, barriers);
    } else {
        take_registers<240>();
        walk_queries<kBf16>(p, walk, pair, tile, shared, barriers, group, thread);
    }
}

extern "C" {
__global__ void __launch_bounds__(384, 1) gradients_bf16(const __grid_constant__ GradParams p) { gradients<true>(p); }
__global__ void __launch_bounds__(384, 1) gradients_fp16(const __grid_constant__ GradParams p) { gradients<false>(p); }
}
