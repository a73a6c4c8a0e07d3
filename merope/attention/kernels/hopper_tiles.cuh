// Tiles of packed keys and values on their way through shared memory: copied, turned into the query camera's view.

constexpr int kTurningWarps = 4 + 3 * kPhases;  // of half 0, and of half 1 where it depends on the query's camera
constexpr float kWeightShift = 8.f;  // the largest weight of the first tile is 2^8: half precision reaches 2^-32 of it

struct AttendParams {
    Tokens q, out;
    const u16* packed_k;
    const u16* packed_v;
    float* lse;                // [batch, heads, queries], natural logarithm
    const float* disparity;    // [tables, queries, 9]
    const float* rotation;     // [tables, queries, kOwnFloats]
    const float* native;       // [tables, queries, 16, 2]
    const u32* key_views;      // [tables, cameras, padded keys / 128, kViewWords * 128] half pairs, see kViewWords: m of six
                               // anchors; row of phasors; cosines and sines of pairs of directions, two by two
    const uint4* phasors;      // half pairs [tables, cameras, key cameras, 6, 2]: cosines, then sines of two pairs
    i64 tables_per_sample;
    int batch, heads, cameras, tokens_per_camera, queries, keys, padded_keys, key_cameras;
    float scale;
    const int4* seen;          // [cameras]: start, stop, start, stop of the keys that a camera sees; with kVisible
    const int* camera_order;   // [cameras], those that see most first; with kVisible
};

// The tiles of keys that a query camera sees: all, or (kVisible) those of two intervals of keys, each tile once.
struct SeenTiles {
    int count, first = 0, split = 0, second = 0;  // first to first + split - 1, then from second on

    __device__ __forceinline__ SeenTiles(const AttendParams& p, int camera) : count((p.keys + kKeys - 1) / kKeys) {
        if (!kVisible) return;
        const int4 keys = __ldg(p.seen + camera);
        first = keys.x / kKeys, split = (keys.y + kKeys - 1) / kKeys - first;
        second = max(keys.z / kKeys, first + split);
        count = split + (keys.w + kKeys - 1) / kKeys - second;
    }
    __device__ __forceinline__ int at(int t) const {
        if (!kVisible) return t;
        return t < split ? first + t : second + t - split;
    }
    // Whether it may hold keys that are not seen, or padding.
    __device__ __forceinline__ bool is_edge(int t) const {
        return t == count - 1 || kVisible && (t == 0 || t == split - 1 || t == split);
    }
};

// Per stage of keys (operand 0) and of values (1): copied, then turned, then used. The first tile of keys lies at
// kTilesAt in shared memory; then come other stages, values, and at kBarriersAt the barriers. Keys are copied and turned
// in turns with the values of as many tiles before as kAhead says.
template <int kStageCount, u32 kTilesAt, u32 kBarriersAt, int kKeysAhead = 0> struct PipelineOf {
    static constexpr int kAhead = kKeysAhead;
    u32 base;  // shared memory address

    static __device__ __forceinline__ u32 parity(int t) { return t / kStageCount & 1; }
    __device__ __forceinline__ u32 tile(int operand, int t) const {
        return base + (operand ? kTilesAt + kStageCount * kTileBytes : kTilesAt) + t % kStageCount * kTileBytes;
    }
    __device__ __forceinline__ u32 barrier(int operand, int kind, int t) const {
        return base + kBarriersAt + 8 * ((operand * 3 + kind) * kStageCount + t % kStageCount);
    }
    __device__ __forceinline__ u32 copied(int operand, int t) const { return barrier(operand, 0, t); }
    __device__ __forceinline__ u32 turned(int operand, int t) const { return barrier(operand, 1, t); }
    __device__ __forceinline__ u32 used(int operand, int t) const { return barrier(operand, 2, t); }
    __device__ __forceinline__ void init(int computing_warps) const {
        for (int operand = 0; operand < 2; ++operand)
            for (int stage = 0; stage < kStageCount; ++stage) {
                barrier_init(copied(operand, stage), 1);
                barrier_init(turned(operand, stage), kTurningWarps);
                barrier_init(used(operand, stage), computing_warps);
            }
        fence_barriers();
    }
    __device__ __forceinline__ void wait_until_free(int operand, int t) const {
        if (t >= kStageCount) barrier_wait(used(operand, t), parity(t - kStageCount));
    }
    __device__ __forceinline__ void wait_until_copied(int operand, int t) const {
        barrier_wait(copied(operand, t), parity(t));
    }
    __device__ __forceinline__ void wait_until_turned(int operand, int t) const {
        barrier_wait(turned(operand, t), parity(t));
    }
};

struct Tile {  // queries of one camera
    int sample, head, camera, first, rows;
    i64 tables;
    __device__ __forceinline__ Tile(const AttendParams& p, int most_rows) {
        const int tokens = p.tokens_per_camera, full = (kVisible ? tokens + most_rows - 1 : tokens) / most_rows;
        const int full_tiles = p.batch * p.heads * p.cameras * full, index = blockIdx.x;
        // A camera's last, smaller tile: scheduled after all others, unless cameras are in order of their work.
        const bool rest = !kVisible && index >= full_tiles;
        const int tile = rest ? full : index % full, group = rest ? index - full_tiles : index / full;
        camera = group % p.cameras;
        if (kVisible) camera = __ldg(p.camera_order + camera);
        head = group / p.cameras % p.heads;
        sample = group / p.cameras / p.heads;
        first = camera * tokens + tile * most_rows;
        rows = min(most_rows, tokens - tile * most_rows);
        tables = sample * p.tables_per_sample;
    }
};

template <class Pipeline>
__device__ __forceinline__ void copy_tiles(
    const AttendParams& p, const Tile& tile, const Pipeline& pipeline, const SeenTiles& seen
) {
    const i64 half = (i64)p.padded_keys * 64, start = (i64)(tile.sample * p.heads + tile.head) * 2 * half;
    wait_for_kernel_before();  // it packs what is copied here, and writes nothing else that is read in this kernel
    for (int step = 0; step < seen.count + Pipeline::kAhead; ++step)
        for (int operand = 0; operand < 2; ++operand) {
            const int t = step - operand * Pipeline::kAhead;
            if (Pipeline::kAhead && (t < 0 || t >= seen.count)) continue;
            const u32 copied = pipeline.copied(operand, t), to = pipeline.tile(operand, t);
            pipeline.wait_until_free(operand, t);
            barrier_expect(copied, kTileBytes);
            const u16* from = (operand ? p.packed_v : p.packed_k) + start + (i64)seen.at(t) * kKeys * 64;
            copy_bulk(to, from, kHalfBytes, copied);
            copy_bulk(to + kHalfBytes, from + half, kHalfBytes, copied);
        }
}

__device__ __forceinline__ bool sees(const AttendParams& p, int camera, int key) {
    const int4 keys = __ldg(p.seen + camera);
    return key >= keys.x && key < keys.y || key >= keys.z && key < keys.w;
}

__device__ __forceinline__ void clear_chunks(u32 row, u32 first, u32 end) {
    for (u32 c = first; c < end; ++c) store_shared(row ^ 16 * c, {});
}

// Half 0 of keys and values, one key a thread.
template <class Pipeline>
__device__ __forceinline__ void turn_tiles(
    const AttendParams& p, const Tile& tile, const Pipeline& pipeline, const SeenTiles& seen, int thread
) {
    const i64 camera = tile.tables * p.cameras + tile.camera;
    const u32* view = p.key_views + camera * kViewWords * p.padded_keys + 4 * thread;
    const uint4* phasors = p.phasors + camera * p.key_cameras * 3;
    view += seen.at(0) * (kViewWords * kKeys);
    FirstTurn turn;
    int camera_now = -1;
    turn.load_view(view, thread);
    auto load_phasors = [&]() {
        if (turn.camera == camera_now) return;
        camera_now = turn.camera;
        turn.load_phasors(phasors + 3 * camera_now);
    };
#pragma unroll 1
    for (int step = 0; step < seen.count + Pipeline::kAhead; ++step) {
        if (!Pipeline::kAhead) load_phasors();
        const bool more = !Pipeline::kAhead && step + 1 < seen.count;
        const u32* next = view + (more ? seen.at(step + 1) - seen.at(step) : 0) * (kViewWords * kKeys);
#pragma unroll 1
        for (int operand = 0; operand < 2; ++operand) {
            const int t = step - operand * Pipeline::kAhead;
            if (Pipeline::kAhead) {  // keys and values in turns are of different tiles
                if (t < 0 || t >= seen.count) continue;
                turn.load_view(view + t * (kViewWords * kKeys), thread);
                load_phasors();
            }
            pipeline.wait_until_copied(operand, t);
            const u32 row = pipeline.tile(operand, t) + thread * 128 + (thread & 7) * 16;
            const bool early = kLoadsEarly && more && operand;
            turn_in_place(row, turn, [&](int group) {
                if (early) turn.load_group(next, thread, group);
            });
            // A value without a weight may be NaN, and 0 times NaN is NaN.
            if (kVisible && operand && seen.is_edge(t) && !sees(p, tile.camera, seen.at(t) * kKeys + thread))
                clear_chunks(row, 0, 8), clear_chunks(row + (1 - kPhases) * kHalfBytes, 0, 8);
            fence_async_proxy();  // waits for loads, too
            __syncwarp();
            if (thread % 32 == 0) barrier_arrive(pipeline.turned(operand, t));
        }
        view = next;
        if (!kLoadsEarly && more) turn.load_view(view, thread);
    }
}

// Half 1 of keys and values with direction phases, by three warps.
template <class Pipeline>
__device__ __forceinline__ void turn_directions(
    const AttendParams& p, const Tile& tile, const Pipeline& pipeline, const SeenTiles& seen, int thread
) {
    const int warp = __shfl_sync(~0u, thread / 32, 0);
    const int to_last = 96 - 32 * warp;  // from a thread's own key to that of the last 32; the swizzle is the same
    const u32* view = p.key_views + (tile.tables * p.cameras + tile.camera) * kViewWords * p.padded_keys + 4 * thread;
    const int to_last_words = warp * kGroupWords + 4 * to_last;
    view += seen.at(0) * (kViewWords * kKeys);
    SecondTurn turn;
    turn.load(view, view + to_last_words, warp);
#pragma unroll 1
    for (int step = 0; step < seen.count + Pipeline::kAhead; ++step) {
        const bool more = !Pipeline::kAhead && step + 1 < seen.count;
        const u32* next = view + (more ? seen.at(step + 1) - seen.at(step) : 0) * (kViewWords * kKeys);
#pragma unroll 1
        for (int operand = 0; operand < 2; ++operand) {
            const int t = step - operand * Pipeline::kAhead;
            if (Pipeline::kAhead) {  // as in turn_tiles
                if (t < 0 || t >= seen.count) continue;
                const u32* of_tile = view + t * (kViewWords * kKeys);
                turn.load(of_tile, of_tile + to_last_words, warp);
            }
            pipeline.wait_until_copied(operand, t);
            const u32 row = pipeline.tile(operand, t) + kHalfBytes + thread * 128 + (thread & 7) * 16;
            const u32 last_row = row + to_last * 128;
            const bool early = kLoadsEarly && more && operand;
            turn.turn_in_place(row, last_row ^ 16 * warp, warp, [&](int chunk) {
                if (early) turn.load_chunk(next, next + to_last_words, warp, chunk);
            });
            if (kVisible && operand && seen.is_edge(t)) {  // as in turn_tiles; each thread what it turned
                auto unseen = [&](int key) { return !sees(p, tile.camera, seen.at(t) * kKeys + key); };
                if (unseen(thread)) clear_chunks(row, 0, 8);
                if (unseen(thread + to_last)) clear_chunks(last_row, warp, warp < 2 ? warp + 1 : 8);
            }
            fence_async_proxy();
            __syncwarp();
            if (thread % 32 == 0) barrier_arrive(pipeline.turned(operand, t));
        }
        view = next;
        if (!kLoadsEarly && more) turn.load(view, view + to_last_words, warp);
    }
}
