// The runtime as a shared object: its C interface, called through ctypes, and the table of calls
// that device code makes.
#include "accesses.hpp"
#include "rendezvous.hpp"
#include "report.hpp"
#include "world.hpp"

#include <exception>

namespace emu {

namespace {

u64 api_block_barrier(Thread* t, BarrierOp op, u32 predicate)
{
    return fiber(t)->world->block_barrier(fiber(t), op, predicate);
}
u64 api_warp(Thread* t, WarpOp op, u32 mask, u64 value, u32 source)
{
    return fiber(t)->world->warp(fiber(t), op, mask, value, source);
}
void api_preempt(Thread* t) { fiber(t)->world->preempt(fiber(t)); }
void api_poll(Thread* t) { fiber(t)->world->poll(fiber(t)); }
u64 api_time_ns(Thread* t)
{
    World* w = fiber(t)->world;
    w->virtual_clock.spend(10);  // a loop that only looks at the clock must see it move
    return w->time_ns();
}
void api_note_epoch(Thread* t, u64 epoch)
{
    fiber(t)->epoch = epoch;
}
void api_note_wait(Thread* t, const u64* address, u64 expected)
{
    fiber(t)->wait_address = address;
    fiber(t)->wait_expected = expected;
}
void api_fence(Thread* t, Scope) { fiber(t)->world->fence(fiber(t)); }
void api_data_load(Thread* t, const void* from, void* to, u32 bytes)
{
    fiber(t)->world->data_load(fiber(t), from, to, bytes);
}
void api_data_store(Thread* t, void* to, const void* from, u32 bytes)
{
    fiber(t)->world->data_store(fiber(t), to, from, bytes);
}
void api_atomic_load(Thread* t, const void* p, u32 bytes, Order order, Scope scope)
{
    fiber(t)->world->atomic_load(fiber(t), p, bytes, order, scope);
}
bool api_atomic_store(Thread* t, void* p, u32 bytes, u64 value, Order order, Scope scope)
{
    return fiber(t)->world->atomic_store(fiber(t), p, bytes, value, order, scope);
}
void api_raw_access(Thread* t, const void* p, u32 bytes, bool write)
{
    fiber(t)->world->raw_access(fiber(t), p, bytes, write);
}
u32 api_atomic_update(Thread* t, void* p, u32 bytes, Order order, Scope scope)
{
    return fiber(t)->world->atomic_update(fiber(t), p, bytes, order, scope);
}
void api_fail(Thread* t, const char* what) { fiber(t)->world->fail(fiber(t), what); }

}  // namespace

const Api kApi = {
    api_block_barrier, api_warp, api_preempt, api_poll, api_time_ns, api_note_epoch,
    api_note_wait, api_fence, api_data_load, api_data_store, api_atomic_load, api_atomic_store,
    api_raw_access, api_atomic_update, api_fail,
};

}  // namespace emu

#define EMU_EXPORT extern "C" __attribute__((visibility("default")))

using emu::World;

EMU_EXPORT World* emu_create(const emu::Options* options) noexcept
{
    try {
        return new World(*options);
    } catch (const std::exception&) {
        return nullptr;
    }
}

EMU_EXPORT void emu_destroy(World* world) noexcept { delete world; }

// Returns the launch's number; 0: no memory for it; ~0: too many threads for the checks.
EMU_EXPORT u64 emu_launch(World* world, u32 rank, const emu::Kernel* kernel, const void* args,
                          const u64* config, u64 config_words, const u32* grid, const u32* block,
                          u64 shared_bytes) noexcept
{
    try {
        return world->launch(rank, kernel, args, config, config_words,
                             dim3(grid[0], grid[1], grid[2]), dim3(block[0], block[1], block[2]),
                             shared_bytes);
    } catch (const std::exception&) {
        return 0;
    }
}

// Runs until something happens; an Event. At most about `wall_ns` of real time.
EMU_EXPORT u32 emu_step(World* world, u64 wall_ns, u64 deadline_ns) noexcept
{
    try {
        return static_cast<u32>(world->step(wall_ns, deadline_ns));
    } catch (const std::exception& error) {
        world->failure.kind = emu::FailureKind::out_of_memory;
        world->failure.text = error.what();
        return static_cast<u32>(emu::Event::failed);
    }
}

// After Event finished: the number of one finished launch.
EMU_EXPORT u64 emu_finished(World* world) noexcept { return world->take_finished(); }

EMU_EXPORT void emu_abandon(World* world) noexcept { world->abandon(); }

EMU_EXPORT u64 emu_time_ns(const World* world) noexcept { return world->time_ns(); }
EMU_EXPORT u64 emu_steps(const World* world) noexcept { return world->steps; }

EMU_EXPORT u32 emu_failure_kind(const World* world) noexcept
{
    return static_cast<u32>(world->failure.kind);
}
EMU_EXPORT u32 emu_failure_rank(const World* world) noexcept { return world->failure.rank; }
EMU_EXPORT const char* emu_failure_text(const World* world) noexcept
{
    return world->failure.text.c_str();
}

// ---- simulations ------------------------------------------------------------------------------------
EMU_EXPORT void emu_move_time(World* world, u64 ns) noexcept { world->virtual_clock.move_to(ns); }

// `kind`: RangeKind. False: there is no memory for it.
EMU_EXPORT u32 emu_register(World* world, u32 rank, const void* address, u64 bytes, u32 kind,
                            const char* name) noexcept
{
    try {
        emu::Range r;
        r.begin = r.origin = reinterpret_cast<uintptr_t>(address);
        r.end = r.begin + bytes;
        r.rank = rank;
        r.kind = static_cast<emu::RangeKind>(kind);
        r.name = name;
        world->ranges.add(r);
        if (world->checks) world->checks->new_range(r);
        return 1;
    } catch (const std::exception&) {
        return 0;
    }
}

EMU_EXPORT u32 emu_mark_written(World* world, u32 rank, const void* address, u64 bytes) noexcept
{
    try {
        const uintptr_t begin = reinterpret_cast<uintptr_t>(address);
        if (world->checks && bytes) world->checks->host_wrote(rank, begin, begin + bytes);
        return 1;
    } catch (const std::exception&) {
        return 0;
    }
}

// What the host of a rank knows travels with what it tells another host: `token` names it.
EMU_EXPORT void emu_host_release(World* world, u32 rank, u64 token)
{
    if (world->checks) world->host_releases[token] = world->checks->host_release(rank);
}
EMU_EXPORT void emu_host_acquire(World* world, u32 rank, u64 token)
{
    const auto found = world->host_releases.find(token);
    if (world->checks && found != world->host_releases.end())
        world->checks->host_acquire(rank, found->second);
}
EMU_EXPORT void emu_host_forget(World* world, u64 token) { world->host_releases.erase(token); }

EMU_EXPORT u32 emu_rank_dead(const World* world, u32 rank) noexcept
{
    return world->ranks[rank].dead;
}
