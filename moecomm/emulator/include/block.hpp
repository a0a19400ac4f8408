// Thread blocks and launches. Blocks are reused from launch to launch.
#pragma once

#include "fiber.hpp"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

namespace emu {

constexpr u32 kWarp = 32;
constexpr int kPoison = 0xcb;  // shared memory starts out as this
constexpr size_t kSharedAlign = 1024;

struct Launch;

// Lanes of one warp that wait in the same collective: disjoint masks may be under way at once.
struct WarpGroup {
    u32 mask;
    u32 arrived;
    WarpOp op;
};

struct Warp {
    u32 alive = 0;
    u32 num_groups = 0;
    WarpGroup groups[kWarp];
};

struct Barrier {
    u32 arrived = 0;
    u32 count = 0;  // predicates that held, of those that have arrived
    BarrierOp op = BarrierOp::plain;
    u64 result = 0;  // of the last one; read before the next can complete
};

class SharedMemory {
public:
    SharedMemory() = default;
    SharedMemory(const SharedMemory&) = delete;
    SharedMemory& operator=(const SharedMemory&) = delete;
    ~SharedMemory() { std::free(data_); }

    void* prepare(size_t bytes)
    {
        if (bytes > bytes_ || !data_) {
            std::free(data_);
            bytes_ = (bytes / kSharedAlign + 1) * kSharedAlign;
            data_ = std::aligned_alloc(kSharedAlign, bytes_);
            if (!data_) throw std::bad_alloc();
        }
        std::memset(data_, kPoison, bytes);
        return data_;
    }

private:
    void* data_ = nullptr;
    size_t bytes_ = 0;
};

struct Block {
    Launch* launch = nullptr;
    u32 number = 0;  // linear block index
    u32 num_threads = 0;
    u32 alive = 0;
    Barrier barrier;
    std::unique_ptr<Fiber[]> fibers;
    std::unique_ptr<Warp[]> warps;
    u32 capacity = 0;  // of `fibers`
    SharedMemory shared;

    uintptr_t shared_begin() const { return reinterpret_cast<uintptr_t>(fibers[0].shared); }
    u32 num_warps() const { return (num_threads + kWarp - 1) / kWarp; }
};

struct Launch {
    u64 id = 0;
    u32 rank = 0;
    World* world = nullptr;
    const Kernel* kernel = nullptr;
    std::string name;
    std::vector<u64> args;  // the blob, in words for its alignment
    std::vector<u64> config;
    dim3 grid, block;
    u64 shared_bytes = 0;
    u64 live_threads = 0;
    std::vector<std::unique_ptr<Block>> blocks;
};

inline uint3 unflatten(u64 i, dim3 extent)
{
    return uint3{static_cast<u32>(i % extent.x), static_cast<u32>(i / extent.x % extent.y),
                 static_cast<u32>(i / extent.x / extent.y)};
}

inline u64 volume(dim3 d) { return static_cast<u64>(d.x) * d.y * d.z; }

// Makes block `number` of `launch` ready to run.
inline void prepare_block(Block& b, Launch& launch, u32 number, const Api* api)
{
    b.launch = &launch;
    b.number = number;
    b.num_threads = b.alive = static_cast<u32>(volume(launch.block));
    b.barrier = Barrier();
    if (b.capacity < b.num_threads) {
        b.fibers.reset(new Fiber[b.num_threads]);
        b.warps.reset(new Warp[(b.num_threads + kWarp - 1) / kWarp]);
        b.capacity = b.num_threads;
    }
    void* shared = b.shared.prepare(launch.shared_bytes);
    for (u32 w = 0; w < b.num_warps(); ++w) {
        const u32 lanes = b.num_threads - w * kWarp;
        b.warps[w].alive = lanes >= kWarp ? ~0u : (1u << lanes) - 1;
        b.warps[w].num_groups = 0;
    }
    const uint3 block_idx = unflatten(number, launch.grid);
    for (u32 i = 0; i < b.num_threads; ++i) {
        Fiber& f = b.fibers[i];
        f.api = api;
        f.config = launch.config.data();
        f.config_bytes = launch.config.size() * sizeof(u64);
        f.shared = shared;
        f.fuel = 0;
        f.pc = f.caller = f.polled = nullptr;
        f.wrote = 0;
        f.lane = i % kWarp;
        f.thread_idx = unflatten(i, launch.block);
        f.block_idx = block_idx;
        f.block_dim = launch.block;
        f.grid_dim = launch.grid;
        f.block = &b;
        f.world = launch.world;
        f.index = i;
        f.state = State::fresh;
        f.poll_began = f.idle_count = 0;
        f.wait_address = nullptr;
        f.epoch = 0;
        f.delayed.clear();
    }
}

}  // namespace emu
