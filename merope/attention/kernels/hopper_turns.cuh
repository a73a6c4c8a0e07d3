// What turns packed keys and values into the view of the query's camera. `view`: a tile's words, at the key's row.

struct KeyTurn {  // one key's operators
    u32 half_vectors[9], phasors[12];

    __device__ __forceinline__ void load_half_vectors(const u32* view) {
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

// What turns a key's half 0 in the forward pass: with direction phases, the last of them, too.
struct FirstTurn : KeyTurn {
    u32 directions[2];
    __device__ __forceinline__ void load_view(const u32* view) {
        load_half_vectors(view);
        if (!kPhases) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) directions[i] = __ldg(view + (9 + kSwappedWord + i) * kKeys);
    }
};
// Chunks c and c + 1 of a key's half 0, in the forward pass. The backward pass has these very instructions in its own
// order of words (TurnedRow).
__device__ __forceinline__ void turn_chunks(uint4& a, uint4& b, int c, const FirstTurn& turn) {
    if (c < 6) {
        const u32* n = turn.half_vectors + 3 * (c / 2);
        reflect(a.x, a.y, a.z, low_twice(n[0]), high_twice(n[0]), low_twice(n[1]));
        reflect(b.x, b.y, b.z, high_twice(n[1]), low_twice(n[2]), high_twice(n[2]));
        turn_pairs(a.w, b.w, turn.phasors[c], turn.phasors[c + 1]);
    } else {
        turn_pairs(a.x, a.y, turn.phasors[6], turn.phasors[7]);
        turn_pairs(a.z, a.w, turn.phasors[8], turn.phasors[9]);
        turn_pairs(b.x, b.y, turn.phasors[10], turn.phasors[11]);
        if (kPhases) turn_pairs(b.z, b.w, turn.directions[0], turn.directions[1]);
    }
}
// `row`: address of its chunk 0, which the swizzle has moved; of chunk c, row ^ 16 c
__device__ __forceinline__ void turn_by_halves(u32 row, const FirstTurn& turn) {
#pragma unroll
    for (int first = 0; first < 8; first += 4) {
        uint4 w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = load_shared(row ^ 16 * (first + i));
#pragma unroll
        for (int i = 0; i < 4; i += 2) turn_chunks(w[i], w[i + 1], first + i, turn);
#pragma unroll
        for (int i = 0; i < 4; ++i) store_shared(row ^ 16 * (first + i), w[i]);
    }
}
__device__ __forceinline__ void turn_in_place(u32 row, const FirstTurn& turn) {
    if (!kPhases) return turn_by_halves(row, turn);  // its threads have fewer registers
    constexpr int kUnderWay = 6;  // as many loads as registers allow: they are waited for once
    uint4 w[8];
#pragma unroll
    for (int i = 0; i < kUnderWay; ++i) w[i] = load_shared(row ^ 16 * i);
    __syncwarp();  // the compiler would put loads off
#pragma unroll
    for (int c = 0; c < 8; c += 2) {
        turn_chunks(w[c], w[c + 1], c, turn);
#pragma unroll
        for (int i = c; i < c + 2; ++i) {
            store_shared(row ^ 16 * i, w[i]);
            if (i + kUnderWay < 8) w[i + kUnderWay] = load_shared(row ^ 16 * (i + kUnderWay));
        }
        if (c + kUnderWay < 8) __syncwarp();
    }
}

struct DirectionTurn {  // one key's phases of directions
    u32 phasors[kDirectionWords];  // cosines, then sines of two pairs

    __device__ __forceinline__ void load(const u32* view) {
#pragma unroll
        for (int i = 0; i < kDirectionWords; ++i) phasors[i] = __ldg(view + (9 + i) * kKeys);
    }
    __device__ __forceinline__ void turn(u32 (&words)[kDirectionWords]) const {  // in the table's order
#pragma unroll
        for (int i = 0; i < kDirectionWords; i += 2) turn_pairs(words[i], words[i + 1], phasors[i], phasors[i + 1]);
    }
    static __device__ __forceinline__ void turn_chunk(uint4& w, const u32* phasors) {
        turn_pairs(w.x, w.y, phasors[0], phasors[1]);
        turn_pairs(w.z, w.w, phasors[2], phasors[3]);
    }
    __device__ __forceinline__ void turn_in_place(u32 row) const {  // a key's half 1, in the forward pass
#pragma unroll
        for (int first = 0; first < 4; first += 3) {  // three chunks, then one: attending threads have few registers
            uint4 w[3];
#pragma unroll
            for (int i = 0; i < 3 && first + i < 4; ++i) w[i] = load_shared(row ^ 16 * (first + i));
#pragma unroll
            for (int i = 0; i < 3 && first + i < 4; ++i) {
                turn_chunk(w[i], phasors + 4 * (first + i));
                store_shared(row ^ 16 * (first + i), w[i]);
            }
        }
    }
};

// Half 1 of 128 keys by three warps: a key a thread, and of the last 32 keys a chunk a thread, two in the last warp.
struct SecondTurn : DirectionTurn {
    u32 last[8];

    __device__ __forceinline__ void load(const u32* view, const u32* last_view, int warp) {
        DirectionTurn::load(view);
#pragma unroll
        for (int i = 0; i < 4; ++i) last[i] = __ldg(last_view + (9 + i) * kKeys);
        if (warp < 2) return;
#pragma unroll
        for (int i = 4; i < 8; ++i) last[i] = __ldg(last_view + (9 + i) * kKeys);
    }
    __device__ __forceinline__ void turn_in_place(u32 row, u32 last_chunk, int warp) const {
        uint4 w[4], l[2];
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = load_shared(row ^ 16 * i);
        l[0] = load_shared(last_chunk);
        __syncwarp();  // the compiler would put loads off
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            turn_chunk(w[i], phasors + 4 * i);
            store_shared(row ^ 16 * i, w[i]);
            if (i == 1 && warp == 2) l[1] = load_shared(last_chunk ^ 16);
        }
        turn_chunk(l[0], last);
        store_shared(last_chunk, l[0]);
        if (warp < 2) return;
        turn_chunk(l[1], last + 4);
        store_shared(last_chunk ^ 16, l[1]);
    }
};
