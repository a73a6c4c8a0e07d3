// MeRoPE's head of 128 channels in the order of the kernels, and the operators that factor per token.

constexpr int kKeys = 128;  // keys of a tile; packed keys are padded to a multiple
constexpr u32 kHalfBytes = kKeys * 128;
constexpr u32 kTileBytes = 2 * kHalfBytes;

struct Tokens {  // [batch, head, token, 128 channels], the last dimension dense; strides in elements
    u16* data;
    i64 batch, head, token;
};

struct PackParams {
    Tokens k, v;
    u16* packed_k;          // [batch * heads, 2 halves, padded keys, 64]
    u16* packed_v;
    const float* rotation;  // [tables, keys, 9]; not read with direction phases
    const float* native;    // [tables, keys, 16, 2]
    i64 tables_per_sample;  // 1: every sample has its own tables; 0: all share one
    int heads, keys, padded_keys;
};

// ---- order of channels ---------------------------------------------------------------------------------------------
// A packed head is two halves of 8 chunks of 8 channels (16 bytes): those that depend on the query's camera, and the
// rest. Chunk c of row r lies at c ^ (r & 7), which is wgmma's 128-byte swizzle.
//   half 0  c < 6: disparity triplets of anchor c as (x x)(y y)(z z), then word c of translation
//           c = 6, 7: words 6 to 11 of translation, then native pairs 14 and 15
//           word 2i: first numbers of translation pairs 2i and 2i + 1; word 2i + 1: their second numbers
//   half 1  c < 6: rotation triplets 2c and 2c + 1, native pair c;  c = 6, 7: native pairs 6 to 13
// With direction phases (kPhases) in place of rotations, half 1 depends on the query's camera, too:
//   half 1  its 32 words are the 18 of directions, laid out as those of translation; then native pairs 0 to 13
// In the forward pass, the last two words of directions and native pairs 14 and 15 change places (kSwapped): half 0 turns
// as a whole, and of half 1 four whole chunks. So no chunk is read and written for a part of it.

constexpr int kDirectionWords = 18;
template <bool kForward> constexpr bool kSwapped = kPhases && kForward;
constexpr int kSwappedWord = 16;  // and the next

// Channel i of a word of pairs that turn two by two
__device__ __forceinline__ int paired_channel(int first, int word, int i) {
    return first + 4 * (word / 2) + (word & 1) + 2 * i;
}
__device__ __forceinline__ int translation_channel(int word, int i) { return paired_channel(72, word, i); }

template <bool kForward> __device__ __forceinline__ int channel(int half, int c, int slot) {
    if (kSwapped<kForward> && slot / 4 == 1 - half && c == 7 - 3 * half)  // the end of chunk 7, the start of chunk 4
        return half ? 124 + slot : paired_channel(36, kSwappedWord - 2 + slot / 2, slot & 1);
    if (half && kPhases) {
        const int word = 4 * c + slot / 2, pair = word - kDirectionWords;
        return pair < 0 ? paired_channel(36, word, slot & 1) : 96 + 2 * pair + (slot & 1);
    }
    if (half) return c >= 6 ? 108 + 8 * (c - 6) + slot : slot < 6 ? 36 + 6 * c + slot : 96 + 2 * c + slot - 6;
    if (c < 6) return slot < 6 ? 6 * c + 3 * (slot & 1) + slot / 2 : translation_channel(c, slot - 6);
    return c == 7 && slot >= 4 ? 120 + slot : translation_channel(6 + 4 * (c - 6) + slot / 2, slot & 1);
}

// The backward pass has the words (two channels) of half 0 in another order. Its sums lie in registers, word w of every
// chunk with lane w of a quad: there, words that turn together have the same w in neighbouring chunks.
//   c = 0, 1, 2  x, y, z of anchors 0 to 3
//   c = 3, 4, 5  x, y, z of anchors 4 and 5; then words 0 and 2, words 1 and 3 of translation, native pairs 14 and 15
//   c = 6, 7     words 4, 6, 8, 10 and words 5, 7, 9, 11 of translation
// And of half 1 with direction phases:
//   c = 0 to 3   words 0, 2, 4, 6; words 1, 3, 5, 7; words 8, 10, 12, 14; words 9, 11, 13, 15 of directions
//   c = 4, 5     words 16 and 17 of directions first; native pairs in all other places
// Where word i of chunk c is there, as 4 chunks + word:
__device__ __forceinline__ int sum_place(int half, int c, int i) {
    if (half && kPhases) {
        const int word = 4 * c + i;
        if (word < kDirectionWords) return 4 * (word / 8 * 2 + word % 2) + word / 2 % 4;
        return word < 21 ? word - 1 : word;
    }
    if (half) return 4 * c + i;
    if (c < 6 && i < 3) return 4 * (c / 4 * 3 + i) + c % 4;
    if (c == 7 && i >= 2) return 20 + i;
    const int word = c < 6 ? c : 6 + 4 * (c - 6) + i;
    return word < 4 ? 4 * (3 + word % 2) + 2 + word / 2 : 4 * (6 + word % 2) + (word - 4) / 2;
}

template <bool kForward> struct Chunk {
    int half, c, channels[8];
    __device__ __forceinline__ Chunk(int half, int c) : half(half), c(c) {
#pragma unroll
        for (int i = 0; i < 8; ++i) channels[i] = channel<kForward>(half, c, i);
    }
    template <bool kBf16> __device__ __forceinline__ void load(float (&x)[8], const u16* token) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = widen<kBf16>(token[channels[i]]);
    }
    __device__ __forceinline__ void scatter(u16* token, const uint4& words) const {
        const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) token[channels[i]] = (u16)(pairs[i / 2] >> 16 * (i % 2));
    }
};

template <bool kBf16> __device__ __forceinline__ uint4 narrowed(const float (&x)[8]) {
    return make_uint4(narrow_pair<kBf16>(x[0], x[1]), narrow_pair<kBf16>(x[2], x[3]),
                      narrow_pair<kBf16>(x[4], x[5]), narrow_pair<kBf16>(x[6], x[7]));
}
__device__ __forceinline__ uint4 packed(const float (&x)[8]) {
    const uint4 words = narrowed<false>(x);
    return make_uint4(bounded2(words.x), bounded2(words.y), bounded2(words.z), bounded2(words.w));
}

// Chunks of 8 neighbouring threads, a half of one token, in the backward pass's order.
struct SumOrder {
    u32* words;  // of these threads, in shared memory: 32 a half
    int c;
    u32 lanes, places = 0;  // where its four words go: a byte each, to save registers
    __device__ __forceinline__ SumOrder(const Chunk<false>& chunk, u32* of_block)
        : words(of_block + threadIdx.x / 8 * 32), c(chunk.c), lanes(0xffu << (threadIdx.x & 24)) {
#pragma unroll
        for (int i = 0; i < 4; ++i) places |= sum_place(chunk.half, c, i) << 8 * i;
    }
    __device__ __forceinline__ uint4 operator()(const uint4& chunk) const {
        __syncwarp(lanes);  // the words before are read
        words[places & 255] = chunk.x, words[places >> 8 & 255] = chunk.y;
        words[places >> 16 & 255] = chunk.z, words[places >> 24] = chunk.w;
        __syncwarp(lanes);
        return ((const uint4*)words)[c];
    }
};

// ---- what factors per token ----------------------------------------------------------------------------------------

__device__ __forceinline__ void turn_pair(float& x, float& y, float2 phasor) {
    const float turned = phasor.x * x - phasor.y * y;
    y = phasor.y * x + phasor.x * y;
    x = turned;
}
__device__ __forceinline__ void turn_triplet(float& x, float& y, float& z, const float (&m)[9]) {
    const float a = x, b = y, c = z;
    x = m[0] * a + m[1] * b + m[2] * c;
    y = m[3] * a + m[4] * b + m[5] * c;
    z = m[6] * a + m[7] * b + m[8] * c;
}

// A token's operator in half 1: a rotation, or phasors of directions. Keys have none of these: cameras see them.
constexpr int kOwnFloats = 9 + 27 * kPhases;

template <bool kForward> struct TokenTurn {  // a token's own operators on one chunk, or their transposes
    using Chunk = ::Chunk<kForward>;
    float frame[9];
    float2 phasors[4];

    // own: as query_operator and key_operator choose; null is the identity
    __device__ __forceinline__ TokenTurn(const Chunk& chunk, const float* own, const float* native, bool transpose) {
        if (chunk.half && kPhases) load_phases(4 * chunk.c, (const float2*)own, (const float2*)native, transpose);
        else load_frame(chunk, own, native, transpose);
    }
    __device__ __forceinline__ void load_frame(
        const Chunk& chunk, const float* own, const float* native, bool transpose
    ) {
#pragma unroll
        for (int i = 0; i < 9; ++i) {
            const float identity = i % 4 == 0 ? 1.f : 0.f;
            frame[i] = own && chunk.c < 6 ? __ldg(own + (transpose ? i % 3 * 3 + i / 3 : i)) : identity;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int pair = -1;
            if (chunk.half) pair = chunk.c >= 6 ? 6 + 4 * (chunk.c - 6) + i : i == 3 ? chunk.c : -1;
            else if (chunk.c == 7 && i >= 2) pair = 12 + i;
            const float2* from = (const float2*)native;
            if (kSwapped<kForward> && pair >= 0) from = (const float2*)own, pair = own ? kSwappedWord - 2 + i : -1;
            phasors[i] = pair < 0 ? make_float2(1.f, 0.f) : __ldg(from + pair);
            if (transpose) phasors[i].y = -phasors[i].y;
        }
    }
    __device__ __forceinline__ void load_phases(int word, const float2* own, const float2* native, bool transpose) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int pair = word + i - kDirectionWords;  // of the native band; directions have as many pairs as words
            if (kSwapped<kForward> && word == kSwappedWord && i < 2) pair = 14 + i;
            phasors[i] = pair >= 0 ? __ldg(native + pair) : own ? __ldg(own + word + i) : make_float2(1.f, 0.f);
            if (transpose) phasors[i].y = -phasors[i].y;
        }
    }
    __device__ __forceinline__ void apply_phases(float (&x)[8], int c) const {
        if (c < 5 - kSwapped<kForward>) turn_pair(x[0], x[2], phasors[0]), turn_pair(x[1], x[3], phasors[1]);
        else turn_pair(x[0], x[1], phasors[0]), turn_pair(x[2], x[3], phasors[1]);
        if (c < 4) turn_pair(x[4], x[6], phasors[2]), turn_pair(x[5], x[7], phasors[3]);
        else turn_pair(x[4], x[5], phasors[2]), turn_pair(x[6], x[7], phasors[3]);
    }
    __device__ __forceinline__ void apply(float (&x)[8], const Chunk& chunk) const {
        if (chunk.half && kPhases) return apply_phases(x, chunk.c);
        if (kSwapped<kForward> && chunk.c >= 6) {  // of chunk 6 nothing: its phasors are 1
            turn_pair(x[4], x[6], phasors[2]), turn_pair(x[5], x[7], phasors[3]);
            return;
        }
        if (chunk.c >= 6) {
#pragma unroll
            for (int i = 0; i < 3; ++i) turn_pair(x[2 * i], x[2 * i + 1], phasors[i]);
        } else if (chunk.half) {
            turn_triplet(x[0], x[1], x[2], frame), turn_triplet(x[3], x[4], x[5], frame);
        } else {
            turn_triplet(x[0], x[2], x[4], frame), turn_triplet(x[1], x[3], x[5], frame);
        }
        turn_pair(x[6], x[7], phasors[3]);
    }
};

template <class Params> __device__ __forceinline__ const float* key_operator(const Params& p, int half, i64 row) {
    return half && !kPhases ? p.rotation + row * 9 : nullptr;
}
template <bool kForward, class Params>
__device__ __forceinline__ const float* query_operator(const Params& p, const Chunk<kForward>& chunk, i64 row) {
    const bool turns = chunk.half || kSwapped<kForward> && chunk.c == 7;  // by what kOwnFloats says
    return (turns ? p.rotation : p.disparity) + row * (turns ? kOwnFloats : 9);
}

// 256 threads pack 16 keys of every `head_step`th head, for the forward or the backward pass. Keys are read as they lie
// (16 bytes a thread) and pass through shared memory to the threads that write them, one for each key, half and chunk.
// Each half has warps of its own, so that its places and operators are known to the compiler.
constexpr int kPackedKeys = 16;
constexpr int kPackedPitch = 128 + 8;  // channels: rows start in different banks
constexpr int kPackedRows = kPackedKeys * kPackedPitch;

struct PackingSpace {
    u16 rows[2][2][kPackedRows];  // by turns for a head and the next: keys, values
    u32 ordered[256 * 4];         // of SumOrder
};

template <bool kBf16, bool kBackward, int kHalf>
__device__ __forceinline__ void pack_half(
    const PackParams& p, PackingSpace& space, int first_key, int first_head, int head_step
) {
    const int sample = blockIdx.y;
    const int read_row = threadIdx.x / 16, read_channel = threadIdx.x % 16 * 8;
    const bool read_padding = first_key + read_row >= p.keys;
    const i64 read_key = read_padding ? 0 : first_key + read_row;
    const u16* from_k = p.k.data + sample * p.k.batch + first_head * p.k.head + read_key * p.k.token + read_channel;
    const u16* from_v = p.v.data + sample * p.v.batch + first_head * p.v.head + read_key * p.v.token + read_channel;
    uint4 next_k = make_uint4(0, 0, 0, 0), next_v = next_k;  // padding stays 0
    auto read_next = [&]() {
        if (read_padding) return;
        next_k = __ldg((const uint4*)from_k), next_v = __ldg((const uint4*)from_v);
        from_k += head_step * p.k.head, from_v += head_step * p.v.head;
    };
    read_next();
    const int row = threadIdx.x / 8 % kPackedKeys, key = first_key + row;
    const Chunk<!kBackward> chunk(kHalf, threadIdx.x % 8);
    const i64 table_row = sample * p.tables_per_sample * p.keys + (key < p.keys ? key : 0);
    const TokenTurn<!kBackward> turn(chunk, key_operator(p, kHalf, table_row), p.native + table_row * 32, false);
    i64 to = ((i64)(sample * p.heads + first_head) * 2 + kHalf) * p.padded_keys + key;
    to = to * 64 + 8 * (chunk.c ^ (key & 7));
    u16* own_row = space.rows[0][0] + row * kPackedPitch;
    u16* read_to = space.rows[0][0] + read_row * kPackedPitch + read_channel;
    int stage = 0;
#pragma unroll 1
    for (int head = first_head; head < p.heads; head += head_step) {
        *(uint4*)(read_to + stage) = next_k;
        *(uint4*)(read_to + stage + kPackedRows) = next_v;
        named_sync<256>(1);
        if (head + head_step < p.heads) read_next();
#pragma unroll
        for (int operand = 0; operand < 2; ++operand) {
            float x[8];
            chunk.template load<kBf16>(x, own_row + stage + operand * kPackedRows);
            if (kHalf || chunk.c == 7 && !kSwapped<!kBackward>) turn.apply(x, chunk);
            if (!kHalf && chunk.c < 6) x[4] = -x[4], x[5] = -x[5];  // see reflect
            uint4* words_to = (uint4*)((operand ? p.packed_v : p.packed_k) + to);
            if constexpr (kBackward) {
                __stwb(words_to, SumOrder(chunk, space.ordered)(packed(x)));
            } else {
                __stwb(words_to, packed(x));  // an assignment becomes four stores
            }
        }
        to += (i64)head_step * p.padded_keys * 128;
        stage ^= 2 * kPackedRows;
    }
}
template <bool kBf16, bool kBackward = true>
__device__ __forceinline__ void pack_keys(const PackParams& p, int block, int first_head, int head_step) {
    __shared__ __align__(16) PackingSpace space;
    const int first_key = kPackedKeys * block;
    if (first_key >= p.padded_keys) return;
    if (threadIdx.x < 128) pack_half<kBf16, kBackward, 0>(p, space, first_key, first_head, head_step);
    else pack_half<kBf16, kBackward, 1>(p, space, first_key, first_head, head_step);
}

extern "C" {
__global__ void __launch_bounds__(256, 4) pack_keys_bf16(const __grid_constant__ PackParams p) {
    let_dependents_start();
    pack_keys<true, false>(p, blockIdx.x, blockIdx.z, gridDim.z);
}
__global__ void __launch_bounds__(256, 4) pack_keys_fp16(const __grid_constant__ PackParams p) {
    let_dependents_start();
    pack_keys<false, false>(p, blockIdx.x, blockIdx.z, gridDim.z);
}
}
