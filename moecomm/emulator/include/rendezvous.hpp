// Block barriers and warp collectives: threads are parked until their partners are there.
#pragma once

#include "world.hpp"

namespace emu {

inline u64 World::block_barrier(Fiber* f, BarrierOp op, u32 predicate)
{
    Block& b = *f->block;
    Barrier& barrier = b.barrier;
    if (barrier.arrived && barrier.op != op) {
        failure.text = describe_thread(*f) + " calls " + name_of(op) +
                       " while other threads of its block wait in " + name_of(barrier.op);
        stop(FailureKind::divergence, f);
    }
    f->delayed.let_out_all();
    barrier.op = op;
    ++barrier.arrived;
    barrier.count += predicate;
    if (barrier.arrived == b.alive) {
        complete_barrier(b, f);
        pass_on(f);
    } else {
        f->state = State::at_barrier;
        leave(f);
    }
    return barrier.result;
}

inline void World::complete_barrier(Block& b, Fiber* last)
{
    if (checks) {
        clocks_.clear();
        for (u32 i = 0; i < b.num_threads; ++i)
            if (b.fibers[i].state == State::at_barrier || &b.fibers[i] == last)
                clocks_.push_back(&b.fibers[i].clock);
        checks->barrier(clocks_);
    }
    Barrier& barrier = b.barrier;
    switch (barrier.op) {
        case BarrierOp::plain: barrier.result = 0; break;
        case BarrierOp::any: barrier.result = barrier.count != 0; break;
        case BarrierOp::all: barrier.result = barrier.count == barrier.arrived; break;
        case BarrierOp::count: barrier.result = barrier.count; break;
    }
    barrier.arrived = barrier.count = 0;
    for (u32 i = b.num_threads; i-- > 0;) {
        Fiber& f = b.fibers[i];
        if (f.state != State::at_barrier) continue;
        f.state = State::ready;
        scheduler.wake(&f);
    }
}

inline u64 World::warp(Fiber* f, WarpOp op, u32 mask, u64 value, u32 source)
{
    Block& b = *f->block;
    const u32 number = f->index / kWarp;
    Warp& w = b.warps[number];
    const u32 bit = 1u << f->lane;
    if (!(mask & bit)) {
        failure.text = describe_thread(*f) + " calls " + name_of(op) + " with mask " +
                       hex(mask) + ", which does not hold its own lane";
        stop(FailureKind::divergence, f);
    }
    if (!checks || checks->orders(op)) f->delayed.let_out_all();
    f->warp_value = value;
    f->warp_source = source;
    u32 g = 0;
    while (g < w.num_groups && w.groups[g].mask != mask) ++g;
    if (g == w.num_groups) w.groups[w.num_groups++] = {mask, 0, op};
    WarpGroup& group = w.groups[g];
    group.arrived |= bit;
    if (group.op != op || w.num_groups > 1) check_group(f, w, group, op);
    if (group.arrived == (mask & w.alive)) {
        complete_group(b, number, g, f);
        pass_on(f);
    } else {
        f->state = State::at_warp;
        leave(f);
    }
    return f->warp_result;
}

// Two groups that wait for lanes of each other never complete; one that waits for lanes of another
// is fine, they come later.
inline void World::check_group(Fiber* f, const Warp& w, const WarpGroup& group, WarpOp op)
{
    if (group.op != op) {
        failure.text = describe_thread(*f) + " calls " + name_of(op) + " with mask " +
                       hex(group.mask) + " while other lanes wait in " + name_of(group.op);
        stop(FailureKind::divergence, f);
    }
    for (u32 g = 0; g < w.num_groups; ++g) {
        const WarpGroup& other = w.groups[g];
        if (&other == &group || !(other.arrived & group.mask) || !(group.arrived & other.mask))
            continue;
        failure.text = describe_thread(*f) + " calls " + name_of(op) + " with mask " +
                       hex(group.mask) + " while lanes of it wait in " + name_of(other.op) +
                       " with mask " + hex(other.mask);
        stop(FailureKind::divergence, f);
    }
}

inline void World::complete_group(Block& b, u32 warp, u32 g, Fiber* last)
{
    Warp& w = b.warps[warp];
    const WarpGroup group = w.groups[g];
    w.groups[g] = w.groups[--w.num_groups];
    Fiber* lanes = &b.fibers[warp * kWarp];
    compute_results(group.op, lanes, group.arrived);
    if (checks && checks->orders(group.op)) {
        clocks_.clear();
        for (u32 lane = 0; lane < kWarp; ++lane)
            if (group.arrived >> lane & 1) clocks_.push_back(&lanes[lane].clock);
        checks->barrier(clocks_);
    }
    for (u32 lane = kWarp; lane-- > 0;) {
        Fiber& f = lanes[lane];
        if (!(group.arrived >> lane & 1) || &f == last) continue;
        f.state = State::ready;
        scheduler.wake(&f);
    }
}

// `f` has ended: others no longer wait for it.
inline void World::leave_warp(Fiber* f)
{
    const u32 number = f->index / kWarp;
    Warp& w = f->block->warps[number];
    w.alive &= ~(1u << f->lane);
    for (u32 g = w.num_groups; g-- > 0;)
        if (w.groups[g].arrived == (w.groups[g].mask & w.alive))
            complete_group(*f->block, number, g, nullptr);
}

}  // namespace emu
