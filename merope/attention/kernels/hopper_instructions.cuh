// What the Hopper kernels ask of the machine: conversions, barriers, bulk copies, tensor cores (sm_90a).
// No headers: hopper_module.py compiles these files as one, at run time, with NVRTC, after two lines that say whether
// directions have phases in place of the rotation block (kPhases), and whether cameras see a part of the keys (kVisible).

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr float kLog2E = 1.4426950408889634f;

// ---- numbers -------------------------------------------------------------------------------------------------------

template <bool kBf16> __device__ __forceinline__ float widen(u16 x) {
    if (kBf16) return __uint_as_float((u32)x << 16);
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
    return wide;
}
template <bool kBf16> __device__ __forceinline__ u32 narrow_pair(float low, float high) {
    u32 pair;
    if (kBf16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ u32 low_twice(u32 pair) {
    u32 twice;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(twice) : "r"(pair));
    return twice;
}
__device__ __forceinline__ u32 high_twice(u32 pair) {
    u32 twice;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(twice) : "r"(pair));
    return twice;
}
__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
    u32 sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}
__device__ __forceinline__ u32 negate2(u32 a) {
    u32 negated;
    asm("neg.f16x2 %0, %1;" : "=r"(negated) : "r"(a));
    return negated;
}
// Within ±16384: a reflection's dot product and the sums of a turn stay finite. NaN stays NaN.
__device__ __forceinline__ u32 bounded2(u32 a) {
    constexpr u32 kMost = 0x74007400;
    constexpr u32 kLeast = 0xf400f400;
    u32 bounded;
    asm("{.reg .b32 x; min.NaN.f16x2 x, %1, %2; max.NaN.f16x2 %0, x, %3;}"
        : "=r"(bounded) : "r"(a), "r"(kMost), "r"(kLeast));
    return bounded;
}
// Of either half as a number without a sign: NaN is beyond infinity.
__device__ __forceinline__ u32 largest2(u32 a, u32 b) {
    u32 largest;
    asm("max.u16x2 %0, %1, %2;" : "=r"(largest) : "r"(a), "r"(b));
    return largest;
}
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float exp2_fast(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

// ---- barriers and copies -------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ uint4 load_shared(u32 address) {
    uint4 w;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "r"(address));
    return w;
}
__device__ __forceinline__ void store_shared(u32 address, const uint4& w) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w));
}
__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void prefetch_bulk(const void* from, u32 bytes) {  // into the L2 cache
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
// Ordinary stores to shared memory become visible to the tensor cores and the copy engine.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Barriers that were made are known to the copy engine.
__device__ __forceinline__ void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Numbers in shared memory are added to those in global memory, later. Waits are of the thread that asked for it: until
// they are read, or until they are added.
__device__ __forceinline__ void add_bulk(float* to, u32 from, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
                 "cp.async.bulk.commit_group;"
                 ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_until_added_are_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void wait_until_added() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
template <int kThreads> __device__ __forceinline__ void named_sync(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
template <int kThreads> __device__ __forceinline__ void named_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// Registers of every thread of a warpgroup, from now on
template <int kCount> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// ---- a kernel and the one after it on the stream --------------------------------------------------------------------

// The next kernel's blocks may start where multiprocessors are free, once every block of this one has come here.
__device__ __forceinline__ void let_dependents_start() { asm volatile("griddepcontrol.launch_dependents;"); }
// What the kernel before wrote is there, and all of it has run.
__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- tensor cores --------------------------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving work on registers across the asynchronous instructions that own them.
template <int n> __device__ __forceinline__ void pin(float (&x)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int n> __device__ __forceinline__ void pin(u32 (&x)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) asm volatile("" : "+r"(x[i])::"memory");
}
// Four 8×8 matrices; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(u32* to, u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(row) : "memory");
}
// Four 8×8 matrices, each transposed on its way; lane i gives the address of row i % 8 of matrix i / 8, as it is stored.
__device__ __forceinline__ void store_transposed(u32 row, const u32* from) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(row), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]) : "memory");
}
// d[16, 8] += a[16, 16] b[8, 16]^T, by one warp
__device__ __forceinline__ void multiply_warp(float* d, const u32* a, const u32* b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// 128-byte swizzle; `halves`: bytes between the halves of a head where channels are not the summed dimension
__device__ __forceinline__ u64 descriptor(u32 address, u32 halves = 16) {
    constexpr u32 kEightRows = 1024;
    return (u64)((address & 0x3ffff) >> 4) | (u64)(halves >> 4) << 16 | (u64)(kEightRows >> 4) << 32 | 1ull << 62;
}
#define REFS4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define REFS16(d, i) REFS4(d, i), REFS4(d, i + 4), REFS4(d, i + 8), REFS4(d, i + 12)
#define REFS32(d) REFS16(d, 0), REFS16(d, 16)
#define REFS64(d) REFS16(d, 0), REFS16(d, 16), REFS16(d, 32), REFS16(d, 48)
#define REFS72(d) REFS64(d), REFS4(d, 64), REFS4(d, 68)
#define LIST32                                                                                                       \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"    \
    "%29,%30,%31}, "
#define LIST64                                                                                                       \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"    \
    "%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,"   \
    "%56,%57,%58,%59,%60,%61,%62,%63}, "
#define LIST72                                                                                                       \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"    \
    "%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,"   \
    "%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71}, "
#define WGMMA_64x64 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " LIST32
#define WGMMA_64x128 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " LIST64
#define WGMMA_64x144 "wgmma.mma_async.sync.aligned.m64n144k16.f32.f16.f16 " LIST72
// d[64, columns] = a b, added to d with `add`, by a warpgroup; 16 numbers are summed. Both are in shared memory, as
// [64 or columns, 16], transposed as [16, 64 or columns]. Warp w has rows 16w to 16w + 15: element 4i + 2r + j of a lane is
// row lane / 4 + 8r of these, column 8i + 2 (lane % 4) + j.
template <bool kTransposedA, bool kTransposedB>
__device__ __forceinline__ void multiply(float (&d)[32], u64 a, u64 b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n" WGMMA_64x64 "%32, %33, add, 1, 1, %35, %36;\n}"
                 : REFS32(d) : "l"(a), "l"(b), "r"(add), "n"((int)kTransposedA), "n"((int)kTransposedB));
}
template <bool kTransposedA, bool kTransposedB>
__device__ __forceinline__ void multiply(float (&d)[64], u64 a, u64 b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n" WGMMA_64x128 "%64, %65, add, 1, 1, %67, %68;\n}"
                 : REFS64(d) : "l"(a), "l"(b), "r"(add), "n"((int)kTransposedA), "n"((int)kTransposedB));
}
template <bool kTransposedA, bool kTransposedB>
__device__ __forceinline__ void multiply(float (&d)[72], u64 a, u64 b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %74, 0;\n" WGMMA_64x144 "%72, %73, add, 1, 1, %75, %76;\n}"
                 : REFS72(d) : "l"(a), "l"(b), "r"(add), "n"((int)kTransposedA), "n"((int)kTransposedB));
}
// The same, added, with a in registers: pairs of columns 2 (lane % 4), then 8 more, each of rows lane / 4 and 8 more.
template <bool kTransposedB> __device__ __forceinline__ void multiply_add(float (&d)[64], const u32* a, u64 b) {
    asm volatile(WGMMA_64x128 "{%64, %65, %66, %67}, %68, 1, 1, 1, %69;"
                 : REFS64(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)kTransposedB));
}
