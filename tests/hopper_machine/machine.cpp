#include "machine.h"
#include "products.h"

#include <csetjmp>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <ucontext.h>
#include <vector>

Index threadIdx, blockIdx, blockDim, gridDim;
alignas(1024) thread_local char dynamic[machine::kMostShared];

namespace machine {
namespace {

constexpr size_t kStack = 1 << 17;
constexpr int kRoundsOfAMood = 40;  // for so many rounds some warps are held back

struct Wait {  // until a counter differs from what it was
    const u32* counter = nullptr;
    u32 mask = 0, before = 0;
    bool over() const { return !counter || (*counter & mask) != before; }
};

struct Barrier { u32 count; int pending; i64 bytes; u32 phase; };
struct NamedBarrier { int arrived = 0, threads = 0; u32 phase = 0; };
struct Copy { u32 to; const void* from; u32 bytes, barrier; };
struct Addition { float* to; u32 from, bytes; };

struct Collective { u32 arrived = 0, phase = 0, numbers[2][kLanes]; };
struct Warp {
    std::map<u32, Collective> by_mask;
    std::deque<Product> products;   // not done yet
    std::deque<size_t> group_sizes; // of those that are committed
    size_t uncommitted = 0;
    bool held = false;
};

struct Thread {
    std::unique_ptr<char[]> stack;
    ucontext_t start;
    jmp_buf state;
    bool started, done;
    Wait wait;
    int index;
    size_t products_of_group;
    std::deque<Addition> additions;
};

struct Block {
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::map<u32, Barrier> barriers;
    NamedBarrier named[16];
    std::vector<Copy> copies;
    u32 shared_bytes;
    std::minstd_rand random;
    bool orderly;  // no surprises: seed 0
    const std::function<void()>* kernel;
    std::string error;
    bool chance(int one_in) { return !orderly && random() % one_in == 0; }
};

Block block;
Thread* now;
jmp_buf scheduler;

[[noreturn]] void leave() { _longjmp(scheduler, 1); }
void enter() {
    (*block.kernel)();
    now->done = true;
    leave();
}
void give_way() {
    if (!_setjmp(now->state)) leave();
}
void wait_for(const u32& counter, u32 mask, u32 before) {
    now->wait = {&counter, mask, before};
    while (!now->wait.over()) give_way();
    now->wait.counter = nullptr;
}
[[noreturn]] void fail(const std::string& what) {  // of a thread: the block ends there
    if (block.error.empty())
        block.error = "thread " + std::to_string(now->index) + " of block " + std::to_string(blockIdx.x) + ": " + what;
    leave();
}
void resume(Thread& thread) {
    now = &thread;
    threadIdx = {thread.index, 0, 0};
    if (_setjmp(scheduler)) return;
    if (thread.started) _longjmp(thread.state, 1);
    thread.started = true;
    setcontext(&thread.start);
}

Warp& own_warp() { return block.warps[now->index / kLanes]; }
int own_lane() { return now->index % kLanes; }

void finish_phase(Barrier& barrier) {
    if (barrier.pending || barrier.bytes) return;
    barrier.pending = barrier.count, ++barrier.phase;
}
Barrier& barrier_at(u32 address) {
    auto found = block.barriers.find(address);
    if (found == block.barriers.end()) fail("no barrier was made at address " + std::to_string(address));
    return found->second;
}
void finish_copy(size_t i) {
    const Copy copy = block.copies[i];
    block.copies.erase(block.copies.begin() + i);
    memcpy(dynamic + copy.to - kSharedStart, copy.from, copy.bytes);
    Barrier& barrier = block.barriers.at(copy.barrier);
    barrier.bytes -= copy.bytes;
    finish_phase(barrier);
}
void finish_addition(Thread& thread) {
    const Addition add = thread.additions.front();
    thread.additions.pop_front();
    for (u32 i = 0; i < add.bytes / 4; ++i) add.to[i] += ((const float*)(dynamic + add.from - kSharedStart))[i];
}

// ---- products -------------------------------------------------------------------------------------------------------

void do_products(Warp& warp, size_t groups) {
    for (; groups; --groups) {
        for (size_t i = warp.group_sizes.front(); i; --i) {
            do_product(warp.products.front(), now->index / kLanes % 4);
            warp.products.pop_front();
        }
        warp.group_sizes.pop_front();
    }
}
// The last lane to come acts for the warp.
void act_together(const std::function<void(Warp&)>& act) {
    Warp& warp = own_warp();
    Collective& all = warp.by_mask[~0u];
    if (all.arrived == kLanes - 1) act(warp);
    collect(~0u, 0);
}

// ---- who runs -------------------------------------------------------------------------------------------------------

void start_block(int threads) {
    block.threads.resize(threads);
    block.warps.assign(threads / kLanes, {});
    block.barriers.clear(), block.copies.clear(), block.error.clear();
    for (NamedBarrier& x : block.named) x = {};
    memset(dynamic, 0xff, sizeof(dynamic));
    for (int i = 0; i < threads; ++i) {
        Thread& thread = block.threads[i];
        if (!thread.stack) thread.stack.reset(new char[kStack]);
        thread.started = thread.done = false, thread.wait = {}, thread.index = i;
        thread.products_of_group = 0, thread.additions.clear();
        getcontext(&thread.start);
        thread.start.uc_stack.ss_sp = thread.stack.get(), thread.start.uc_stack.ss_size = kStack;
        thread.start.uc_link = nullptr;
        makecontext(&thread.start, enter, 0);
    }
}
bool run_once(bool held_too) {  // whether any thread ran
    bool any = false;
    const int warps = block.warps.size(), first = block.orderly ? 0 : block.random() % warps;
    for (int w = 0; w < warps; ++w) {
        const int warp = (first + w) % warps;
        if (block.warps[warp].held && !held_too) continue;
        for (int lane = 0; lane < kLanes; ++lane) {
            Thread& thread = block.threads[warp * kLanes + lane];
            if (thread.done || !thread.wait.over()) continue;
            any = true;
            resume(thread);
            if (!block.error.empty()) return false;
        }
    }
    return any;
}
std::string who_waits() {
    std::string who;
    int count = 0;
    for (Thread& thread : block.threads)
        if (!thread.done && ++count < 9) who += " " + std::to_string(thread.index);
    return std::to_string(count) + " threads of block " + std::to_string(blockIdx.x) + " wait for ever:" + who;
}
std::string run_block() {
    for (int round = 0;; ++round) {
        if (round % kRoundsOfAMood == 0)
            for (Warp& warp : block.warps) warp.held = block.chance(3);
        while (!block.copies.empty() && (block.orderly || block.chance(4))) finish_copy(block.random() % block.copies.size());
        const bool any = run_once(false) || (block.error.empty() && run_once(true));
        if (!block.error.empty()) return block.error;
        if (any) continue;
        if (!block.copies.empty()) {
            finish_copy(block.random() % block.copies.size());
            continue;
        }
        for (Thread& thread : block.threads)
            if (!thread.done) return who_waits();
            else if (!thread.additions.empty()) return "a thread ended before what it added was read";
        return "";
    }
}

}  // namespace

std::string run(Index grid, int threads, u32 shared_bytes, u32 seed, const std::function<void()>& kernel) {
    if (shared_bytes > kMostShared) return "more shared memory than a block may have";
    gridDim = grid, blockDim = {threads, 1, 1};
    block.kernel = &kernel, block.shared_bytes = shared_bytes, block.orderly = seed == 0, block.random.seed(seed + 1);
    for (int z = 0; z < grid.z; ++z)
        for (int y = 0; y < grid.y; ++y)
            for (int x = 0; x < grid.x; ++x) {
                blockIdx = {x, y, z};
                start_block(threads);
                const std::string error = run_block();
                if (!error.empty()) return error;
            }
    return "";
}

char* shared(u32 address, u32 bytes) {
    if (address < kSharedStart || address + bytes > kSharedStart + block.shared_bytes)
        fail("address " + std::to_string(address) + " is not in shared memory");
    return dynamic + address - kSharedStart;
}

const u32* collect(u32 mask, u32 number) {
    Collective& all = own_warp().by_mask[mask];
    const u32 phase = all.phase;
    u32* numbers = all.numbers[phase % 2];
    numbers[own_lane()] = number;
    if (++all.arrived == (u32)__builtin_popcount(mask)) all.arrived = 0, ++all.phase;
    else wait_for(all.phase, ~0u, phase);
    return numbers;
}
void arrive_named(int id, int threads, bool wait) {
    NamedBarrier& x = block.named[id];
    if (x.arrived && x.threads != threads) fail("barrier " + std::to_string(id) + " is waited for by different numbers");
    x.threads = threads;
    const u32 phase = x.phase;
    if (++x.arrived == threads) x.arrived = 0, ++x.phase;
    else if (wait) wait_for(x.phase, ~0u, phase);
}

void init_barrier(u32 address, u32 count) { block.barriers[address] = {count, (int)count, 0, 0}; }
void arrive(u32 address) {
    Barrier& barrier = barrier_at(address);
    if (--barrier.pending < 0) fail("more threads arrive at a barrier than it was made for");
    finish_phase(barrier);
}
void expect_bytes(u32 address, u32 bytes) {
    barrier_at(address).bytes += bytes;
    arrive(address);
}
void wait(u32 address, u32 parity) {
    const Barrier& barrier = barrier_at(address);
    wait_for(barrier.phase, 1, parity & 1);
}

void copy(u32 to, const void* from, u32 bytes, u32 barrier) {
    if (bytes % 16 || to % 16 || (uintptr_t)from % 16) fail("bulk copies are of multiples of 16 bytes");
    memset(shared(to, bytes), 0xff, bytes);
    barrier_at(barrier);
    block.copies.push_back({to, from, bytes, barrier});
}
void add(float* to, u32 from, u32 bytes) {
    shared(from, bytes);
    now->additions.push_back({to, from, bytes});
    if (block.chance(2)) finish_addition(*now);
}
void wait_until_added() {
    while (!now->additions.empty()) finish_addition(*now);
}

void multiply(float* d, int count, const u32* a_registers, Operand a, Operand b, bool add) {
    Warp& warp = own_warp();
    const size_t index = warp.products.size() - warp.uncommitted + now->products_of_group++;
    if (index == warp.products.size()) warp.products.push_back({}), ++warp.uncommitted;
    Product& product = warp.products[index];
    product.a = a, product.b = b, product.count = count, product.add = add;
    product.d[own_lane()] = d, product.a_registers[own_lane()] = a_registers;
}
void commit_products() {
    now->products_of_group = 0;
    act_together([](Warp& warp) {
        warp.group_sizes.push_back(warp.uncommitted);
        warp.uncommitted = 0;
        if (block.chance(2)) do_products(warp, warp.group_sizes.size());
    });
}
void wait_for_products(int pending) {
    act_together([&](Warp& warp) {
        if (warp.group_sizes.size() > (size_t)pending) do_products(warp, warp.group_sizes.size() - pending);
    });
}

void load_matrices(u32* to, u32 row) {
    const u32* rows = collect(~0u, row);
    for (int i = 0; i < 4; ++i) memcpy(to + i, shared(rows[8 * i + own_lane() / 4] + own_lane() % 4 * 4, 4), 4);
    collect(~0u, 0);
}
void store_transposed(u32 row, const u32* from) {
    const u32* rows = collect(~0u, row);
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 2; ++j) {
            const u16 half = from[i] >> 16 * j;
            memcpy(shared(rows[8 * i + own_lane() % 4 * 2 + j] + own_lane() / 4 * 2, 2), &half, 2);
        }
    collect(~0u, 0);
}
void multiply_warp(float* d, const u32* a, const u32* b) {
    float rows[16][16], columns[8][16];
    for (int i = 0; i < 6; ++i) {
        const u32* words = collect(~0u, i < 4 ? a[i] : b[i - 4]);
        for (int lane = 0; lane < kLanes; ++lane)
            for (int j = 0; j < 2; ++j) {
                const float x = widened(words[lane] >> 16 * j);
                const int k = lane % 4 * 2 + j;
                if (i < 4) rows[lane / 4 + i % 2 * 8][k + i / 2 * 8] = x;
                else columns[lane / 4][k + (i - 4) * 8] = x;
            }
    }
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 16; ++k)
            d[i] += rows[own_lane() / 4 + i / 2 * 8][k] * columns[own_lane() % 4 * 2 + i % 2][k];
}

}  // namespace machine
