// Keys, values and the sums of their gradients on their way into and out of a camera's view, in the backward pass's
// order of words (sum_place).

__device__ __forceinline__ float2 widen_pair(u32 w) {
    return make_float2(widen<false>((u16)w), widen<false>((u16)(w >> 16)));
}

struct CameraTables {  // of one query camera, for one tile of keys
    const u32* key_views;
    const uint4* phasors;
};

// Half 0 of one packed key (or value) on its way to the tile in the camera's view, and what turns it: the instructions
// of turn_chunks in the backward pass's order of words.
struct TurnedRow {
    u32 words[8][4];
    KeyTurn turn;

    __device__ __forceinline__ u32 number_twice(int i) const {
        return i % 2 ? high_twice(turn.half_vectors[i / 2]) : low_twice(turn.half_vectors[i / 2]);
    }
    __device__ __forceinline__ void load(const uint4* from, int swizzle) {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const uint4 w = from[c ^ swizzle];
            words[c][0] = w.x, words[c][1] = w.y, words[c][2] = w.z, words[c][3] = w.w;
        }
    }
    __device__ __forceinline__ void store(uint4* to, int swizzle) {
#pragma unroll
        for (int a = 0; a < 6; ++a) {
            const int c = a / 4 * 3, w = a % 4;
            reflect(words[c][w], words[c + 1][w], words[c + 2][w], number_twice(3 * a), number_twice(3 * a + 1),
                    number_twice(3 * a + 2));
        }
#pragma unroll
        for (int i = 0; i < 6; ++i) {
            const int c = i < 2 ? 3 : 6, w = i < 2 ? 2 + i : i - 2;
            turn_pairs(words[c][w], words[c + 1][w], turn.phasors[2 * i], turn.phasors[2 * i + 1]);
        }
#pragma unroll
        for (int c = 0; c < 8; ++c)
            to[c ^ swizzle] = make_uint4(words[c][0], words[c][1], words[c][2], words[c][3]);
    }
};

// The sums of two keys in registers, their half 0 into a camera's view (sign 1) or out of it (-1): what turns together
// is with one thread. A reflection is its own inverse.
// Operators rounded to half precision stretch by 2^-12, and sums pass through those of every camera: here they are made
// orthogonal again, to first order in what they lack.
struct HalfVector {
    float m[3], along[3];
    __device__ __forceinline__ HalfVector(float x, float y, float z) : m{x, y, z} {
        const float factor = 4.f - 2.f * (x * x + y * y + z * z);
#pragma unroll
        for (int i = 0; i < 3; ++i) along[i] = m[i] * factor;
    }
    __device__ __forceinline__ void reflect(float& x, float& y, float& z) const {
        const float dot = m[0] * x + m[1] * y + m[2] * z;
        x -= dot * along[0], y -= dot * along[1], z -= dot * along[2];
    }
};
__device__ __forceinline__ float2 unit_phasor(float cosine, float sine) {
    const float factor = 1.5f - 0.5f * (cosine * cosine + sine * sine);
    return make_float2(cosine * factor, sine * factor);
}

// Half 1 of one packed key (or value): what turns of it, and its phases of directions.
struct TurnedDirections {
    u32 words[kDirectionWords];  // in the table's order
    DirectionTurn turn;

    __device__ __forceinline__ void load(const uint4* from, int swizzle, const u32* view) {
        turn.load(view);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const uint4 w = __ldg(from + (c ^ swizzle));
            u32* to = words + c / 2 * 8 + c % 2;
            to[0] = w.x, to[2] = w.y, to[4] = w.z, to[6] = w.w;
        }
        words[16] = __ldg((const u32*)(from + (4 ^ swizzle))), words[17] = __ldg((const u32*)(from + (5 ^ swizzle)));
    }
    __device__ __forceinline__ void store(uint4* to, int swizzle) {
        turn.turn(words);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const u32* w = words + c / 2 * 8 + c % 2;
            to[c ^ swizzle] = make_uint4(w[0], w[2], w[4], w[6]);
        }
        *(u32*)(to + (4 ^ swizzle)) = words[16], *(u32*)(to + (5 ^ swizzle)) = words[17];
    }
};

struct SumTurn {  // a key's operators on the words of one lane, into a camera's view (sign 1) or out of it (-1)
    u32 anchor[2], mixed[2];  // mixed: another anchor, or cosines and sines of two pairs
    uint2 pairs;

    __device__ __forceinline__ void load(const CameraTables& tables, int row, int key_camera, int word) {
        const u32* n = tables.key_views + 4 * row;
        const u32* phasors = (const u32*)(tables.phasors + 3 * key_camera);
        // Words 0 and 1, 1 and 2, 3 and 4, 4 and 5; then 6 and 7, 7 and 8
        anchor[0] = __ldg(n + (word < 3 ? word + word / 2 : kGroupWords));
        anchor[1] = __ldg(n + (word < 2 ? word + 1 : kGroupWords + word - 2));
        const u32* other = word < 2 ? n + kGroupWords + 2 + word : phasors + 2 * (word - 2);
        mixed[0] = __ldg(other), mixed[1] = __ldg(other + (word == 1 ? kGroupWords - 3 - (4 - kLastWords) * row : 1));
        pairs = __ldg((const uint2*)phasors + 2 + word);
    }
    // An anchor's three numbers are the first of two words' four, or the last. Both columns.
    static __device__ __forceinline__ void reflect(float (&d)[64], int at, const u32 (&words)[2], int word) {
        const float2 low = widen_pair(words[0]), high = widen_pair(words[1]);
        const bool last = word & 1;
        const HalfVector n(last ? low.y : low.x, last ? high.x : low.y, last ? high.y : high.x);
        n.reflect(d[at], d[at + 4], d[at + 8]);
        n.reflect(d[at + 1], d[at + 5], d[at + 9]);
    }
    static __device__ __forceinline__ void turn(float (&d)[64], int at, float2 cosines, float2 sines, float sign) {
        turn_pair(d[at], d[at + 4], unit_phasor(cosines.x, sign * sines.x));
        turn_pair(d[at + 1], d[at + 5], unit_phasor(cosines.y, sign * sines.y));
    }
    __device__ __forceinline__ void all_lanes(float (&d)[64], int r, int word, float sign) const {
        reflect(d, 2 * r, anchor, word);
        turn(d, 24 + 2 * r, widen_pair(pairs.x), widen_pair(pairs.y), sign);
    }
    __device__ __forceinline__ void lower_lanes(float (&d)[64], int r, int word) const {
        reflect(d, 12 + 2 * r, mixed, word);
    }
    __device__ __forceinline__ void upper_lanes(float (&d)[64], int r, float sign) const {
        turn(d, 12 + 2 * r, widen_pair(mixed[0]), widen_pair(mixed[1]), sign);
    }
};
template <int kViews> struct SumTurns {  // of two keys, through one view or two; loaded before the first is applied
    SumTurn turns[kViews][2];

    __device__ __forceinline__ void load(
        int view, const CameraTables& tables, const int (&row)[2], const int (&key_camera)[2], int word
    ) {
#pragma unroll
        for (int r = 0; r < 2; ++r) turns[view][r].load(tables, row[r], key_camera[r], word);
    }
    __device__ __forceinline__ void apply(
        float (&dk)[64], float (&dv)[64], const float (&signs)[kViews], int word
    ) const {
#pragma unroll
        for (int i = 0; i < 2 * kViews; ++i) {
            turns[i / 2][i % 2].all_lanes(dk, i % 2, word, signs[i / 2]);
            turns[i / 2][i % 2].all_lanes(dv, i % 2, word, signs[i / 2]);
        }
        if (word < 2) {
#pragma unroll
            for (int i = 0; i < 2 * kViews; ++i) {
                turns[i / 2][i % 2].lower_lanes(dk, i % 2, word);
                turns[i / 2][i % 2].lower_lanes(dv, i % 2, word);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 2 * kViews; ++i) {
                turns[i / 2][i % 2].upper_lanes(dk, i % 2, signs[i / 2]);
                turns[i / 2][i % 2].upper_lanes(dv, i % 2, signs[i / 2]);
            }
        }
    }
};

template <int kViews> struct DirectionSumTurns {  // as SumTurns, of half 1: two words' pairs a lane, lane 0 has a third
    u32 phasors[kViews][2][6];

    __device__ __forceinline__ void load(int view, const CameraTables& tables, const int (&row)[2], int word) {
#pragma unroll
        for (int i = 0; i < 6; ++i) {
            const int r = i / 3, j = i % 3, two = 4 * j + (j < 2 ? word : 0);
            const uint2 words = __ldg((const uint2*)direction_words(tables.key_views + 4 * row[r], 2 * two));
            phasors[view][r][2 * j] = words.x, phasors[view][r][2 * j + 1] = words.y;
        }
    }
    __device__ __forceinline__ void turn(float (&d)[64], int view, int r, int j, float sign) const {
        const u32* two = phasors[view][r] + 2 * j;
        SumTurn::turn(d, 32 + 8 * j + 2 * r, widen_pair(two[0]), widen_pair(two[1]), sign);
    }
    __device__ __forceinline__ void apply(
        float (&dk)[64], float (&dv)[64], const float (&signs)[kViews], int word
    ) const {
#pragma unroll
        for (int i = 0; i < 4 * kViews; ++i) {
            const int view = i / 4, r = i / 2 % 2, j = i % 2;
            turn(dk, view, r, j, signs[view]), turn(dv, view, r, j, signs[view]);
        }
        if (word) return;
#pragma unroll
        for (int i = 0; i < 2 * kViews; ++i)
            turn(dk, i / 2, i % 2, 2, signs[i / 2]), turn(dv, i / 2, i % 2, 2, signs[i / 2]);
    }
};
