// Accesses of programs built with checks: what the checks say, and what faults do to them.
#pragma once

#include "world.hpp"

#include <cstring>

namespace emu {

inline void World::verify(bool ok, const Fiber* f)
{
    if (ok) return;
    failure.text = checks->violation().text;
    stop(checks->violation().kind, f);
}

inline void World::data_load(Fiber* f, const void* from, void* to, u32 bytes)
{
    if (checks) verify(checks->load(f, from, bytes), f);
    if (!f->delayed.empty()) f->delayed.let_out(from, bytes);
    std::memcpy(to, from, bytes);
}

inline void World::data_store(Fiber* f, void* to, const void* from, u32 bytes)
{
    if (checks) verify(checks->store(f, to, bytes), f);
    if (options.faults.delay_stores) {
        const Range* range = ranges.find(reinterpret_cast<uintptr_t>(to));
        StoreBuffer& delayed = f->delayed;
        delayed.let_out(to, bytes);
        if (!delayed.empty() && fault_random_.chance(16))
            delayed.let_out_one(fault_random_.below(delayed.size()));
        if (range && range->rank != f->block->launch->rank) {
            delayed.push(to, from, bytes);
            return;
        }
    }
    std::memcpy(to, from, bytes);
}

inline void World::atomic_load(Fiber* f, const void* p, u32 bytes, Order order, Scope scope)
{
    if (!f->delayed.empty()) f->delayed.let_out(p, bytes);
    if (checks) verify(checks->atomic_load(f, p, bytes, order, scope), f);
}

// The n-th release of a flag that the simulation knows is lost, or done twice.
inline bool World::atomic_store(Fiber* f, void* p, u32 bytes, u64 value, Order order, Scope scope)
{
    f->delayed.let_out(p, bytes);
    if (order == Order::release) f->delayed.let_out_all();
    if (order == Order::release && ranges.find(reinterpret_cast<uintptr_t>(p))) {
        ++num_releases_;
        if (num_releases_ == options.faults.drop_nth_release) return false;
        if (num_releases_ == options.faults.duplicate_release)
            again_ = {static_cast<u64*>(p), value, steps + fault_random_.below(1000)};
    }
    if (checks) verify(checks->atomic_store(f, p, bytes, order, scope), f);
    return true;
}

inline u32 World::atomic_update(Fiber* f, void* p, u32 bytes, Order order, Scope scope)
{
    f->delayed.let_out(p, bytes);
    u32 times = 1;
    if (order != Order::relaxed) f->delayed.let_out_all();
    if (order == Order::release && ranges.find(reinterpret_cast<uintptr_t>(p))) {
        ++num_releases_;
        if (num_releases_ == options.faults.drop_nth_release) return 0;
        if (num_releases_ == options.faults.duplicate_release) times = 2;
    }
    if (checks) verify(checks->atomic_update(f, p, bytes, order, scope), f);
    return times;
}

inline void World::raw_access(Fiber* f, const void* p, u32 bytes, bool write)
{
    if (!f->delayed.empty()) f->delayed.let_out(p, bytes);
    if (checks) verify(checks->raw_access(f, p, bytes, write), f);
}

inline void World::fence(Fiber* f)
{
    f->delayed.let_out_all();
    if (checks) checks->fence(f);
}

}  // namespace emu
