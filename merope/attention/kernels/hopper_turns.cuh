// What turns packed keys and values into the view of the query's camera.

// A tile's words: groups of four of each of its keys, so that a thread reads 16 bytes at a time. Groups 0 and 1: half-vectors,
// two numbers a word; group 2: their last word, the key's own camera; then, with direction phases, words 16 and 17 of these.
// Groups 3 to 6: words 0 to 15 of directions. `view`: a tile's words at the key's row of group 0.
constexpr int kLastWords = 2 + 2 * kPhases;  // of group 2
constexpr int kViewWords = 8 + kLastWords + kSwappedWord * kPhases;
constexpr int kGroupWords = 4 * kKeys;

__device__ __forceinline__ void load_words(u32* to, const u32* from) {
    const uint4 w = __ldg((const uint4*)from);
    to[0] = w.x, to[1] = w.y, to[2] = w.z, to[3] = w.w;
}
__device__ __forceinline__ const u32* last_words(const u32* view, int row) {
    return view + 2 * kGroupWords - (4 - kLastWords) * row;
}
__device__ __forceinline__ const u32* direction_words(const u32* view, int word) {  // of the word and the next: it is even
    if (word == kSwappedWord) return view + 2 * kGroupWords + 2;
    return view + (3 + word / 4) * kGroupWords + word % 4;
}

// The next tile's tables are loaded as soon as the present ones have done their work, into their registers: before the fence,
// which waits for loads. What it delays, values of a tile, is needed no earlier than keys of the next. Not where keys are
// ahead, nor where cameras see a part of the keys: there registers are short.
constexpr int kLoadsEarly = 1 - kVisible;

struct KeyTurn {  // one key's operators
    u32 half_vectors[9], phasors[12];

    __device__ __forceinline__ void load_half_vectors(const u32* view, int row) {
#pragma unroll
        for (int i = 0; i < 2; ++i) load_words(half_vectors + 4 * i, view + i * kGroupWords);
        half_vectors[8] = __ldg(last_words(view, row));
    }
    __device__ __forceinline__ void load_phasors(const uint4* from) {
#pragma unroll
        for (int i = 0; i < 3; ++i) load_words(phasors + 4 * i, (const u32*)(from + i));
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
    int camera;  // the key's
    u32 directions[2];
    __device__ __forceinline__ void load_group(const u32* view, int row, int group) {
        if (group < 2) return load_words(half_vectors + 4 * group, view + group * kGroupWords);
        const u32* from = last_words(view, row);
        if (kPhases) {
            u32 words[4];
            load_words(words, from);
            half_vectors[8] = words[0], camera = words[1], directions[0] = words[2], directions[1] = words[3];
        } else {
            const uint2 words = __ldg((const uint2*)from);
            half_vectors[8] = words.x, camera = words.y;
        }
    }
    __device__ __forceinline__ void load_view(const u32* view, int row) {
#pragma unroll
        for (int group = 0; group < 3; ++group) load_group(view, row, group);
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
// Last chunks first, where tables are loaded early: the camera, in group 2, is needed first.
__device__ __forceinline__ int chunk_in_order(int i) { return kLoadsEarly ? 7 - i : i; }
// `row`: address of its chunk 0, which the swizzle has moved; of chunk c, row ^ 16 c. `done` is told of groups of words that
// are not needed any more (in this order of chunks).
template <class Done> __device__ __forceinline__ void turn_by_halves(u32 row, const FirstTurn& turn, const Done& done) {
#pragma unroll
    for (int half = 0; half < 8; half += 4) {
        uint4 w[8];
#pragma unroll
        for (int i = half; i < half + 4; ++i) w[chunk_in_order(i)] = load_shared(row ^ 16 * chunk_in_order(i));
#pragma unroll
        for (int i = half; i < half + 4; i += 2) {
            const int c = chunk_in_order(i) & 6;
            turn_chunks(w[c], w[c + 1], c, turn);
            if (c < 6) done(c / 2);
        }
#pragma unroll
        for (int i = half; i < half + 4; ++i) {
            const int c = chunk_in_order(half) & 4 | i & 3;
            store_shared(row ^ 16 * c, w[c]);
        }
    }
}
template <class Done> __device__ __forceinline__ void turn_in_place(u32 row, const FirstTurn& turn, const Done& done) {
    if (!kPhases) return turn_by_halves(row, turn, done);  // its threads have fewer registers
    constexpr int kUnderWay = 6;  // as many loads as registers allow: they are waited for once
    uint4 w[8];
    auto load = [&](int i) { w[chunk_in_order(i)] = load_shared(row ^ 16 * chunk_in_order(i)); };
#pragma unroll
    for (int i = 0; i < kUnderWay; ++i) load(i);
    __syncwarp();  // the compiler would put loads off
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const int c = chunk_in_order(i) & 6;
        turn_chunks(w[c], w[c + 1], c, turn);
        if (c < 6) done(c / 2);
#pragma unroll
        for (int j = i; j < i + 2; ++j) {
            store_shared(row ^ 16 * chunk_in_order(j), w[chunk_in_order(j)]);
            if (j + kUnderWay < 8) load(j + kUnderWay);
        }
        if (i + kUnderWay < 8) __syncwarp();
    }
}

struct DirectionTurn {  // one key's phases of directions
    u32 phasors[kDirectionWords];  // cosines, then sines of two pairs

    __device__ __forceinline__ void load(const u32* view) {
#pragma unroll
        for (int i = 0; i < kSwappedWord; i += 4) load_words(phasors + i, direction_words(view, i));
        const uint2 words = __ldg((const uint2*)direction_words(view, kSwappedWord));
        phasors[16] = words.x, phasors[17] = words.y;
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

    // chunk: of its own key 0 to 3, then of the last keys; last_view: their words of the warp's chunk at group 0
    __device__ __forceinline__ void load_chunk(const u32* view, const u32* last_view, int warp, int chunk) {
        if (chunk < 4) load_words(phasors + 4 * chunk, direction_words(view, 4 * chunk));
        else if (chunk == 4 || warp == 2) load_words(last + 4 * (chunk - 4), direction_words(last_view, 4 * (chunk - 4)));
    }
    __device__ __forceinline__ void load(const u32* view, const u32* last_view, int warp) {
#pragma unroll
        for (int chunk = 0; chunk < 6; ++chunk) load_chunk(view, last_view, warp, chunk);
    }
    // `done` is told of chunks whose words are not needed any more.
    template <class Done>
    __device__ __forceinline__ void turn_in_place(u32 row, u32 last_chunk, int warp, const Done& done) const {
        uint4 w[4], last_w;
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = load_shared(row ^ 16 * i);
        last_w = load_shared(last_chunk);
        __syncwarp();  // the compiler would put loads off
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            turn_chunk(w[i], phasors + 4 * i);
            done(i);
            store_shared(row ^ 16 * i, w[i]);
            if (i == 1 && warp == 2) w[0] = load_shared(last_chunk ^ 16);  // there: it takes no registers
        }
        turn_chunk(last_w, last);
        done(4);
        store_shared(last_chunk, last_w);
        if (warp < 2) return;
        turn_chunk(w[0], last + 4);
        done(5);
        store_shared(last_chunk ^ 16, w[0]);
    }
};
