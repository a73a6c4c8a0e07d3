// Queries on their way into shared memory, and outputs on their way out: neighbouring threads have neighbouring bytes of
// a token, and chunks turn by the query's own operators.

template <int kCount, int kThreads> struct Rows {  // queries of one camera, for threads that wait for each other
    int thread, first, rows, barrier;
    __device__ __forceinline__ int token(int row) const { return first + min(row, rows - 1); }  // the last repeats
    __device__ __forceinline__ void sync() const { named_sync<kThreads>(barrier); }
    // So many times 16 bytes of rows of 256 bytes, neighbours by neighbouring threads.
    static __device__ constexpr int copies() { return kCount * 16 / kThreads; }
    __device__ __forceinline__ int copied_row(int i) const { return kThreads / 16 * i + thread / 16; }
    // By 128 threads: a half of the channels, in chunks.
    static __device__ constexpr int turns() { return kCount / 16; }
    __device__ __forceinline__ int turned_row(int i) const { return 16 * i + thread % 128 / 8; }
    static __device__ constexpr u32 half_bytes() { return kCount * 128; }
};

template <bool kBf16, class Rows>
__device__ __forceinline__ void load_queries(
    const AttendParams& p, const Tile& tile, const Rows& rows, char* shared
) {
    const u16* head = p.q.data + tile.sample * p.q.batch + tile.head * p.q.head;
    const int own_column = rows.thread % 16;
    uint4 words[Rows::copies()];
#pragma unroll
    for (int i = 0; i < Rows::copies(); ++i)
        words[i] = __ldg((const uint4*)(head + rows.token(rows.copied_row(i)) * p.q.token) + own_column);
#pragma unroll
    for (int i = 0; i < Rows::copies(); ++i)
        *((uint4*)(shared + rows.copied_row(i) * 256) + own_column) = words[i];
    rows.sync();
    const Chunk<true> chunk(rows.thread / 8 & 1, rows.thread & 7);
#pragma unroll
    for (int i = 0; i < Rows::copies(); ++i) {
        const int row = rows.copied_row(i);
        const i64 at = tile.tables * p.queries + rows.token(row);
        const TokenTurn<true> turn(chunk, query_operator(p, chunk, at), p.native + at * 32, true);
        float x[8];
        chunk.load<kBf16>(x, (const u16*)(shared + row * 256));
        turn.apply(x, chunk);
        words[i] = packed(x);
    }
    rows.sync();
#pragma unroll
    for (int i = 0; i < Rows::copies(); ++i) {
        const int row = rows.copied_row(i);
        *(uint4*)(shared + chunk.half * Rows::half_bytes() + row * 128 + ((chunk.c ^ (row & 7)) << 4)) = words[i];
    }
}

// ---- outputs -------------------------------------------------------------------------------------------------------
// They are staged as float32 [rows, 64 channels of a half].

// Where chunk c of a row starts. Rows that one instruction writes are neighbours in one kernel and every second one in
// the other: either way they are in different banks.
__device__ __forceinline__ int staged_chunk(int row, int c) { return row * 64 + 8 * ((c ^ row ^ row >> 1) & 7); }

template <bool kBf16, class Rows>
__device__ __forceinline__ void turn_outputs(
    const AttendParams& p, const Tile& tile, const Rows& rows, const float* staged, const Chunk<true>& chunk,
    uint4 (&words)[Rows::turns()]
) {
#pragma unroll
    for (int i = 0; i < Rows::turns(); ++i) {
        const int row = rows.turned_row(i), from = staged_chunk(row, chunk.c);
        const i64 at = tile.tables * p.queries + rows.token(row);
        const TokenTurn<true> turn(chunk, query_operator(p, chunk, at), p.native + at * 32, false);
        float x[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = staged[from + j];
        turn.apply(x, chunk);
        words[i] = narrowed<kBf16>(x);
    }
}
// Into rows of 256 bytes in the order of channels outside
template <class Rows>
__device__ __forceinline__ void scatter_outputs(
    const Rows& rows, const Chunk<true>& chunk, const uint4 (&words)[Rows::turns()], char* shared
) {
#pragma unroll
    for (int i = 0; i < Rows::turns(); ++i) chunk.scatter((u16*)(shared + rows.turned_row(i) * 256), words[i]);
}
template <class Rows>
__device__ __forceinline__ void store_outputs(
    const AttendParams& p, const Tile& tile, const Rows& rows, const char* shared
) {
    u16* head = p.out.data + tile.sample * p.out.batch + tile.head * p.out.head;
#pragma unroll
    for (int i = 0; i < Rows::copies(); ++i) {
        const int row = rows.copied_row(i);
        if (row < rows.rows)
            *((uint4*)(head + (rows.first + row) * p.out.token) + rows.thread % 16) =
                *((const uint4*)(shared + row * 256) + rows.thread % 16);
    }
}
__device__ __forceinline__ void store_log_sum(const AttendParams& p, const Tile& tile, int token, float sum, float shift) {
    p.lse[(i64)(tile.sample * p.heads + tile.head) * p.queries + token] = __logf(sum) - shift / kLog2E;
}

// ---- who does what -------------------------------------------------------------------------------------------------

// 65536 in all.
constexpr int kTurningRegisters = 56 + 8 * kPhases;
constexpr int kCopyingRegisters = 24 + 40 * kPhases;
constexpr int kAttendingRegisters = 216 - 24 * kPhases;

// Warpgroups 0 and 1 attend, 2 turns tiles, 3 copies them; with direction phases three warps of it turn, too.
template <class Pipeline, class Attend>
__device__ __forceinline__ void share_work(
    const AttendParams& p, const Tile& tile, const Pipeline& pipeline, int computing_warps, const Attend& attend
) {
    const SeenTiles seen(p, tile.camera);
    if (threadIdx.x == 0) pipeline.init(computing_warps);
    __syncthreads();
    // Shuffled, so that the compiler knows it to be the same for a whole warp.
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), thread = threadIdx.x % 128;
    if (group == 3) {
        give_registers<kCopyingRegisters>();
        if (thread == 0) copy_tiles(p, tile, pipeline, seen);
        if (kPhases && thread >= 32) turn_directions(p, tile, pipeline, seen, thread - 32);
    } else if (group == 2) {
        give_registers<kTurningRegisters>();
        turn_tiles(p, tile, pipeline, seen, thread);
    } else {
        take_registers<kAttendingRegisters>();
        attend(seen, group, thread);
    }
}
