// Tiles of packed keys and values on their way through shared memory: copied, turned into the query camera's view.

constexpr int kTurningWarps = 4 + 3 * kPhases;  // of half 0, and of half 1 where it depends on the query's camera
constexpr int kViewWords = 9 + kDirectionWords * kPhases;  // of a key in a camera's view
constexpr float kWeightShift = 8.f;  // the largest weight of the first tile is 2^8: half precision reaches 2^-32 of it

struct AttendParams {
    Tokens q, out;
    const u16* packed_k;
    const u16* packed_v;
    float* lse;                // [batch, heads, queries], natural logarithm
    const float* disparity;    // [tables, queries, 9]
    const float* rotation;     // [tables, queries, kOwnFloats]
    const float* native;       // [tables, queries, 16, 2]
    const u32* key_views;      // half pairs [tables, cameras, padded keys / 128, kViewWords, 128]: m of six
                               // anchors; with direction phases, then cosines and sines of their pairs, two by two
    const uint4* phasors;      // half pairs [tables, cameras, key cameras, 6, 2]: cosines, then sines of two pairs
    const int* key_camera;     // [padded keys]
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
// kTilesAt in shared memory; then come other stages, values, and at kBarriersAt the barriers.
template <int kStageCount, u32 kTilesAt, u32 kBarriersAt> struct PipelineOf {
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
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
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

// ---- keys and values in the view of the query's camera -------------------------------------------------------------

struct KeyTurn {  // one key's operators
    u32 half_vectors[9], phasors[12];

    __device__ __forceinline__ void load_half_vectors(const u32* view) {  // of a tile, at the key's row
#pragma unroll
        for (int i = 0; i < 9; ++i) half_vectors[i] = __ldg(view + i * kKeys);
    }
    __device__ __forceinline__ void load_phasors(const uint4* from) {
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            const uint4 w = __ldg(from + i);
            u32* to = phasors + 4 * i;
            to[0] = w.x, to[1] = w.y, to[2] = w.z, to[3] = w.w;
        }
    }
};

// MinRot is two half-turns, A(u) = (2 m m^T - I) diag(-1, -1, 1), m the half-vector of the optical axis and u. With z
// negated beforehand (y = (x, y, -z)) it is y - 2 m (m . y). Two triplets at a time. Doubling is exact, and numbers of
// m are at most 1: those of sqrt(2) m, without a doubling, are rounded twice as coarsely beyond 1.
__device__ __forceinline__ void reflect(u32& x, u32& y, u32& z, u32 mx, u32 my, u32 mz) {
    constexpr u32 kMinusTwo = 0xc000c000;
    const u32 dot = mul2(kMinusTwo, fma2(mz, z, fma2(my, y, mul2(mx, x))));
    x = fma2(dot, mx, x), y = fma2(dot, my, y), z = fma2(dot, mz, z);
}
__device__ __forceinline__ void turn_pairs(u32& x, u32& y, u32 cosines, u32 sines) {
    const u32 turned = fma2(cosines, x, negate2(mul2(sines, y)));
    y = fma2(sines, x, mul2(cosines, y));
    x = turned;
}
// Chunks `first` to `first` + 3 of a key's half 0, in the forward pass. The backward pass has these very instructions
// in its own order of words (TurnedRow).
__device__ __forceinline__ void turn_chunks(uint4 (&w)[4], int first, const KeyTurn& turn) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const int c = first + i;
        uint4 &a = w[i], &b = w[i + 1];
        if (c < 6) {
            const u32* n = turn.half_vectors + 3 * (c / 2);
            reflect(a.x, a.y, a.z, low_twice(n[0]), high_twice(n[0]), low_twice(n[1]));
            reflect(b.x, b.y, b.z, high_twice(n[1]), low_twice(n[2]), high_twice(n[2]));
            turn_pairs(a.w, b.w, turn.phasors[c], turn.phasors[c + 1]);
        } else {
            turn_pairs(a.x, a.y, turn.phasors[6], turn.phasors[7]);
            turn_pairs(a.z, a.w, turn.phasors[8], turn.phasors[9]);
            turn_pairs(b.x, b.y, turn.phasors[10], turn.phasors[11]);
        }
    }
}
// `row`: address of its chunk 0, which the swizzle has moved; of chunk c, row ^ 16 c
__device__ __forceinline__ void turn_in_place(u32 row, const KeyTurn& turn) {
#pragma unroll
    for (int first = 0; first < 8; first += 4) {  // by halves: a whole row would not fit the registers
        uint4 w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = load_shared(row ^ 16 * (first + i));
        turn_chunks(w, first, turn);
#pragma unroll
        for (int i = 0; i < 4; ++i) store_shared(row ^ 16 * (first + i), w[i]);
    }
}

struct DirectionTurn {  // one key's phases of directions
    u32 phasors[kDirectionWords];  // cosines, then sines of two pairs

    __device__ __forceinline__ void load(const u32* view) {  // of a tile, at the key's row
#pragma unroll
        for (int i = 0; i < kDirectionWords; ++i) phasors[i] = __ldg(view + (9 + i) * kKeys);
    }
    __device__ __forceinline__ void turn(u32 (&words)[kDirectionWords]) const {  // in the forward pass's order
#pragma unroll
        for (int i = 0; i < kDirectionWords; i += 2) turn_pairs(words[i], words[i + 1], phasors[i], phasors[i + 1]);
    }
    __device__ __forceinline__ void turn_in_place(u32 row) const {  // a key's half 1
#pragma unroll
        for (int first = 0; first < 6; first += 3) {  // chunk 4 to its middle, of chunk 5 nothing
            uint4 w[3];
#pragma unroll
            for (int i = 0; i < 3 && first + i < 5; ++i) w[i] = load_shared(row ^ 16 * (first + i));
#pragma unroll
            for (int i = 0; i < 3 && first + i < 5; ++i) {
                const u32* phasor = phasors + 4 * (first + i);
                turn_pairs(w[i].x, w[i].y, phasor[0], phasor[1]);
                if (first + i < 4) turn_pairs(w[i].z, w[i].w, phasor[2], phasor[3]);
                store_shared(row ^ 16 * (first + i), w[i]);
            }
        }
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
    for (int t = 0; t < seen.count; ++t)
        for (int operand = 0; operand < 2; ++operand) {
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
    const u32* view = p.key_views + camera * kViewWords * p.padded_keys + thread;
    const uint4* phasors = p.phasors + camera * p.key_cameras * 3;
    const int* key_camera = p.key_camera + thread;
    auto advance = [&](int tiles) { view += tiles * (kViewWords * kKeys), key_camera += tiles * kKeys; };
    advance(seen.at(0));
    KeyTurn turn;
    int camera_now = -1, camera_next = __ldg(key_camera);
    turn.load_half_vectors(view);
#pragma unroll 1
    for (int t = 0; t < seen.count; ++t) {
        if (camera_next != camera_now) {
            camera_now = camera_next;
            turn.load_phasors(phasors + 3 * camera_now);
        }
#pragma unroll 1
        for (int operand = 0; operand < 2; ++operand) {
            pipeline.wait_until_copied(operand, t);
            const u32 row = pipeline.tile(operand, t) + thread * 128 + (thread & 7) * 16;
            turn_in_place(row, turn);
            // A value without a weight may be NaN, and 0 times NaN is NaN.
            if (kVisible && operand && seen.is_edge(t) && !sees(p, tile.camera, seen.at(t) * kKeys + thread))
                clear_chunks(row, 0, 8), clear_chunks(row + (1 - kPhases) * kHalfBytes, 0, 8);
            fence_async_proxy();  // waits for loads, too: none may be under way here
            __syncwarp();
            if (thread % 32 == 0) barrier_arrive(pipeline.turned(operand, t));
        }
        if (t + 1 < seen.count) {
            advance(seen.at(t + 1) - seen.at(t));
            turn.load_half_vectors(view);
            camera_next = __ldg(key_camera);
        }
    }
}

// Half 1 with direction phases, by three warps: a key a thread, and of the last 32 keys two chunks a thread.
struct LastKeysTurn {
    u32 phasors[8];

    __device__ __forceinline__ void load(const u32* words, int warp) {  // the warp's, at the key's row
        phasors[0] = __ldg(words), phasors[1] = __ldg(words + kKeys);
        if (warp == 2) return;
#pragma unroll
        for (int i = 2; i < 8; ++i) phasors[i] = __ldg(words + i * kKeys);
    }
    __device__ __forceinline__ void turn_in_place(u32 chunk, int warp) const {
        uint4 w[2];
#pragma unroll
        for (u32 i = 0; i < 2; ++i) w[i] = load_shared(chunk ^ 16 * i);
        turn_pairs(w[0].x, w[0].y, phasors[0], phasors[1]);
        if (warp < 2) {  // of the last chunk nothing else
            turn_pairs(w[0].z, w[0].w, phasors[2], phasors[3]);
            turn_pairs(w[1].x, w[1].y, phasors[4], phasors[5]);
            turn_pairs(w[1].z, w[1].w, phasors[6], phasors[7]);
        }
#pragma unroll
        for (u32 i = 0; i < 2; ++i) store_shared(chunk ^ 16 * i, w[i]);
    }
};

template <class Pipeline>
__device__ __forceinline__ void turn_directions(
    const AttendParams& p, const Tile& tile, const Pipeline& pipeline, const SeenTiles& seen, int thread
) {
    const int warp = thread / 32, last = 96 + thread % 32;
    const u32* view = p.key_views + (tile.tables * p.cameras + tile.camera) * kViewWords * p.padded_keys + thread;
    DirectionTurn turn;
    LastKeysTurn last_turn;
    auto load = [&](int tiles) {  // so many tiles on
        view += tiles * (kViewWords * kKeys);
        turn.load(view), last_turn.load(view + (9 + 8 * warp) * kKeys + last - thread, warp);
    };
    load(seen.at(0));
#pragma unroll 1
    for (int t = 0; t < seen.count; ++t) {
#pragma unroll 1
        for (int operand = 0; operand < 2; ++operand) {
            pipeline.wait_until_copied(operand, t);
            const u32 half = pipeline.tile(operand, t) + kHalfBytes;
            const u32 row = half + thread * 128 + (thread & 7) * 16, last_row = half + last * 128 + (last & 7) * 16;
            turn.turn_in_place(row);
            last_turn.turn_in_place(last_row ^ 32 * warp, warp);
            if (kVisible && operand && seen.is_edge(t)) {  // as in turn_tiles; each thread what it turned
                auto unseen = [&](int key) { return !sees(p, tile.camera, seen.at(t) * kKeys + key); };
                if (unseen(thread)) clear_chunks(row, 0, 8);
                if (unseen(last)) clear_chunks(last_row, 2 * warp, warp < 2 ? 2 * warp + 2 : 8);
            }
            fence_async_proxy();
            __syncwarp();
            if (thread % 32 == 0) barrier_arrive(pipeline.turned(operand, t));
        }
        if (t + 1 < seen.count) load(seen.at(t + 1) - seen.at(t));
    }
}
