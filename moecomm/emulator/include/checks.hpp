// What is looked at with each access: was it written, in the right epoch, and in which order?
//
// Order is happens-before at thread granularity: launch order of a rank, release → acquire of the
// same flag, __syncthreads, warp collectives (with `strict`, as PTX has it, __syncwarp alone),
// fences, and what hosts exchange. Two data accesses of a granule, one of them a write, must be
// ordered. So must a data access and an atomic one; atomic ones need no order among themselves.
// The check does not depend on the values that come out, so it finds a missing release, or a slot
// that is used again before its reader has acknowledged, in any schedule that runs both accesses.
#pragma once

#include "names.hpp"
#include "ranges.hpp"
#include "shadow.hpp"

#include <algorithm>
#include <deque>
#include <string>
#include <vector>

namespace emu {

enum class FailureKind : u32 {  // names: failures.py
    none = 0, deadlock, divergence, step_limit, stack_overflow, out_of_memory, uninitialised, stale,
    race, scope, misaligned, out_of_range, foreign, kernel_error,
};

struct Violation {
    FailureKind kind = FailureKind::none;
    std::string text;
};

class Checks {
public:
    Checks(u32 num_ranks, Ranges& ranges, bool strict)
        : slots_(num_ranks), ranges_(ranges), history_(num_ranks), next_time_(num_ranks, 1),
          strict_(strict)
    {
    }

    const Violation& violation() const { return violation_; }

    // ---- launches -----------------------------------------------------------------------------
    // False: more threads than the checks can take.
    bool begin_launch(Launch& l)
    {
        const u32 per_block = l.blocks.front()->num_warps();
        if (!slots_.reserve(l.rank, per_block * static_cast<u32>(l.blocks.size()))) return false;
        ThreadClock& host = slots_.host(l.rank);
        Clock known = host.known;
        ThreadClock::join(known, host.release(), slots_.size());
        for (const auto& b : l.blocks)
            for (u32 i = 0; i < b->num_threads; ++i) {
                ThreadClock& t = b->fibers[i].clock;
                t = ThreadClock();
                t.known = known;
                t.slot = slots_.slot(l.rank, b->number * per_block + i / kWarp, i % kWarp);
                t.now = next_time_[l.rank];
            }
        history_[l.rank].push_back({next_time_[l.rank], l.name, l.grid, l.block});
        if (l.shared_bytes)
            for (const auto& b : l.blocks) watch_shared(*b);
        return true;
    }

    void end_launch(Launch& l)
    {
        std::vector<ThreadClock*> all;
        u32 last = 0;
        for (const auto& b : l.blocks)
            for (u32 i = 0; i < b->num_threads; ++i) {
                all.push_back(&b->fibers[i].clock);
                last = std::max(last, b->fibers[i].clock.now);
            }
        ThreadClock& host = slots_.host(l.rank);
        all.push_back(&host);
        join_all(all, slots_.size());
        for (ThreadClock* t : all)
            if (t != &host) *t = ThreadClock();
        next_time_[l.rank] = last + 2;
        if (l.shared_bytes)
            for (const auto& b : l.blocks)
                ranges_.remove(b->shared_begin(), b->shared_begin() + l.shared_bytes);
    }

    // ---- hosts --------------------------------------------------------------------------------
    Released host_release(u32 rank) { return slots_.host(rank).release(); }
    void host_acquire(u32 rank, const Released& r) { slots_.host(rank).acquire(r, slots_.size()); }
    void new_range(const Range& r) { shadow_.set_written(r.begin, r.end, Access()); }
    void host_wrote(u32 rank, uintptr_t begin, uintptr_t end)
    {
        ThreadClock& host = slots_.host(rank);
        shadow_.set_written(begin, end, {host.slot, host.now, 0, 0});
    }

    // ---- order --------------------------------------------------------------------------------
    void barrier(const std::vector<ThreadClock*>& threads) { join_all(threads, slots_.size()); }
    bool orders(WarpOp op) const { return op == WarpOp::sync || !strict_; }

    void fence(Fiber* f)
    {
        ThreadClock& t = f->clock;
        if (t.seen.size()) {
            t.known.own(slots_.size());
            t.known.raise(t.seen);
            t.seen = Clock();
        }
        t.fenced = t.release();
    }

    // ---- data ---------------------------------------------------------------------------------
    bool load(Fiber* f, const void* p, u32 bytes) { return access<false>(f, p, bytes); }
    bool store(Fiber* f, const void* p, u32 bytes) { return access<true>(f, p, bytes); }
    bool raw_access(Fiber* f, const void* p, u32 bytes, bool write)
    {
        return write ? access<true>(f, p, bytes) : access<false>(f, p, bytes);
    }

    // ---- flags and counters -------------------------------------------------------------------
    bool atomic_load(Fiber* f, const void* p, u32 bytes, Order order, Scope scope)
    {
        AtomicWord& word = shadow_.word(reinterpret_cast<uintptr_t>(p));
        if (!atomic_access(f, p, bytes, scope, word, false)) return false;
        observe(f, word, order);
        return true;
    }

    bool atomic_store(Fiber* f, const void* p, u32 bytes, Order order, Scope scope)
    {
        AtomicWord& word = shadow_.word(reinterpret_cast<uintptr_t>(p));
        if (!atomic_access(f, p, bytes, scope, word, true)) return false;
        word.released = order == Order::release ? f->clock.release() : f->clock.fenced;
        return true;
    }

    bool atomic_update(Fiber* f, const void* p, u32 bytes, Order order, Scope scope)
    {
        AtomicWord& word = shadow_.word(reinterpret_cast<uintptr_t>(p));
        if (!atomic_access(f, p, bytes, scope, word, true)) return false;
        const bool releases = order == Order::release || order == Order::acq_rel;
        observe(f, word, order);
        merge(word.released, releases ? f->clock.release() : f->clock.fenced, slots_.size());
        return true;
    }

private:
    struct Past {
        u32 first_time;
        std::string name;
        dim3 grid, block;
    };

    void watch_shared(const Block& b)
    {
        Range r;
        r.begin = r.origin = b.shared_begin();
        r.end = r.begin + b.launch->shared_bytes;
        r.rank = b.launch->rank;
        r.kind = RangeKind::local;
        r.name = "shared[block " + std::to_string(b.number) + "]";
        ranges_.add(r);
        new_range(r);
    }

    Access now(const Fiber* f) const
    {
        return {f->clock.slot, f->clock.now, static_cast<u32>(f->epoch), place_of(f->pc)};
    }

    void observe(Fiber* f, const AtomicWord& word, Order order)
    {
        ThreadClock& t = f->clock;
        const Released& r = word.released;
        if (!r.any || t.knows(r)) return;
        if (order == Order::acquire || order == Order::acq_rel)
            t.acquire(r, slots_.size());
        else if (!covers(t.seen, r))
            ThreadClock::join(t.seen, r, slots_.size());
    }

    template <bool kWrite>
    bool access(Fiber* f, const void* p, u32 bytes)
    {
        const uintptr_t begin = reinterpret_cast<uintptr_t>(p), end = begin + bytes;
        if (begin % bytes) return misaligned(f, p, bytes);
        const Range* range = ranges_.find(begin);
        if (!range) return true;
        if (end > range->end) return out_of_range(f, p, bytes);
        if (is_foreign(f, *range)) return foreign(f, p);
        for (uintptr_t at = begin & ~uintptr_t(kGranule - 1); at < end; at += kGranule) {
            Cell& cell = shadow_.cell(at);
            const bool whole = at >= begin && at + kGranule <= end;
            if (cell.flags & (kAtomicFirst | kAtomicSecond))
                if (!ordered_with_atomics<kWrite>(f, cell, at)) return false;
            if (whole && !(cell.flags & kFine)) {
                if (!touch<kWrite>(f, cell, cell, at, *range)) return false;
                continue;
            }
            auto& fine = shadow_.fine(cell);
            for (uintptr_t b = std::max(at, begin); b < std::min(at + kGranule, end); ++b)
                if (!touch<kWrite>(f, fine[b - at], cell, b, *range)) return false;
            if (kWrite && whole) {
                const Access write = fine[0].write;
                shadow_.join_fine(cell);
                cell.write = write;
            }
        }
        return true;
    }

    // A rank's own memory is not mapped by its peers.
    static bool is_foreign(const Fiber* f, const Range& range)
    {
        return range.kind == RangeKind::local && range.rank != f->block->launch->rank;
    }

    // One cell; `outer` holds the flags of the granule.
    template <bool kWrite>
    bool touch(Fiber* f, Cell& c, const Cell& outer, uintptr_t at, const Range& range)
    {
        const ThreadClock& t = f->clock;
        const bool written = c.write.slot != kNobody;
        if (written && !t.after(c.write.slot, c.write.time))
            return race(f, kWrite, "write", c.write, at);
        if (kWrite) {
            if (const Access* reader = unordered_reader(t, c))
                return race(f, true, "read", *reader, at);
            shadow_.forget_readers(c);
            c.write = now(f);
            return true;
        }
        if (!written && range.kind != RangeKind::input && !(outer.flags & kAtomicWritten))
            return uninitialised(f, at);
        if (written && range.kind == RangeKind::symmetric && c.write.epoch && f->epoch &&
            c.write.epoch != static_cast<u32>(f->epoch))
            return stale(f, c.write, at);
        note_reader(f, c);
        return true;
    }

    const Access* unordered_reader(const ThreadClock& t, Cell& c)
    {
        if (c.flags & kManyReaders) return shadow_.readers(c).unordered(t);
        return c.read.slot != kNobody && !t.after(c.read.slot, c.read.time) ? &c.read : nullptr;
    }

    void note_reader(Fiber* f, Cell& c)
    {
        const ThreadClock& t = f->clock;
        if (c.flags & kManyReaders) {
            shadow_.readers(c).add(now(f));
        } else if (c.read.slot == kNobody || t.after(c.read.slot, c.read.time)) {
            c.read = now(f);
        } else {
            shadow_.many_readers(c);
            shadow_.readers(c).add(now(f));
        }
    }

    // The word that covers the granule at `at`: one that begins there, or one granule before.
    template <bool kWrite>
    bool ordered_with_atomics(Fiber* f, Cell& cell, uintptr_t at)
    {
        for (u32 back = 0; back <= kGranule; back += kGranule) {
            if (!(cell.flags & (back ? kAtomicSecond : kAtomicFirst))) continue;
            AtomicWord& word = shadow_.word(at - back);
            if (const Access* other = word.writes.unordered(f->clock))
                return race(f, kWrite, "atomic write", *other, at);
            if (!kWrite) continue;
            if (const Access* other = word.reads.unordered(f->clock))
                return race(f, true, "atomic read", *other, at);
            word.released = Released();
        }
        return true;
    }

    bool atomic_access(Fiber* f, const void* p, u32 bytes, Scope scope, AtomicWord& word, bool write)
    {
        const uintptr_t begin = reinterpret_cast<uintptr_t>(p);
        if (begin % bytes) return misaligned(f, p, bytes);
        const Range* range = ranges_.find(begin);
        if (!range) return true;
        if (begin + bytes > range->end) return out_of_range(f, p, bytes);
        if (is_foreign(f, *range)) return foreign(f, p);
        if (scope == Scope::device && range->rank != f->block->launch->rank)
            return wrong_scope(f, p);
        for (uintptr_t at = begin; at < begin + bytes; at += kGranule) {
            Cell& cell = shadow_.cell(at);
            cell.flags |= at == begin ? kAtomicFirst : kAtomicSecond;
            if (write) cell.flags |= kAtomicWritten;
            if (cell.flags & kFine) {
                for (Cell& byte : shadow_.fine(cell))
                    if (!ordered_with_data(f, byte, at, write)) return false;
            } else if (!ordered_with_data(f, cell, at, write)) {
                return false;
            }
        }
        (write ? word.writes : word.reads).add(now(f));
        return true;
    }

    bool ordered_with_data(Fiber* f, Cell& c, uintptr_t at, bool write)
    {
        if (c.write.slot != kNobody && !f->clock.after(c.write.slot, c.write.time))
            return race(f, write, "write", c.write, at, "atomic ");
        if (write)
            if (const Access* reader = unordered_reader(f->clock, c))
                return race(f, true, "read", *reader, at, "atomic ");
        return true;
    }

    // ---- reports --------------------------------------------------------------------------------
    std::string place(uintptr_t at) const
    {
        return ranges_.describe(reinterpret_cast<const void*>(at));
    }

    std::string who(const Fiber* f, const Access& a) const
    {
        if (slots_.is_host(a.slot)) return "the host of rank " + std::to_string(a.slot);
        const Slots::Owner owner = slots_.owner(a.slot);
        const auto& past = history_[owner.rank];
        auto it = std::upper_bound(past.begin(), past.end(), a.time,
                                   [](u32 time, const Past& p) { return time < p.first_time; });
        if (it == past.begin()) return "rank " + std::to_string(owner.rank);
        --it;
        const u32 per_block = static_cast<u32>((volume(it->block) + kWarp - 1) / kWarp);
        const uint3 b = unflatten(owner.warp / per_block, it->grid);
        const uint3 t = unflatten(owner.warp % per_block * kWarp + a.slot % 32, it->block);
        std::string text = it->name + " on rank " + std::to_string(owner.rank) + ", block " +
                           triple(b.x, b.y, b.z) + ", thread " + triple(t.x, t.y, t.z);
        if (a.epoch) text += ", epoch " + std::to_string(a.epoch);
        return text + describe_place(a.place, f->pc);
    }

    bool violate(FailureKind kind, std::string text)
    {
        violation_.kind = kind;
        violation_.text = std::move(text);
        return false;
    }

    bool race(Fiber* f, bool write, const char* other_what, Access other, uintptr_t at,
              const char* how = "")
    {
        const char* what = write ? "write" : "read";
        return violate(FailureKind::race,
                       std::string(how) + what + " of " + place(at) + " is not ordered after the " +
                           other_what + " of it\n  " + what + ": " + describe_thread(*f) + "\n  " +
                           other_what + ": " + who(f, other));
    }

    bool uninitialised(Fiber* f, uintptr_t at)
    {
        return violate(FailureKind::uninitialised, "read of " + place(at) +
                                                       ", which nobody has written\n  read: " +
                                                       describe_thread(*f));
    }

    bool stale(Fiber* f, const Access& write, uintptr_t at)
    {
        return violate(FailureKind::stale,
                       "read of " + place(at) + ", which holds data of epoch " +
                           std::to_string(write.epoch) + "\n  read: " + describe_thread(*f) +
                           "\n  write: " + who(f, write));
    }

    bool wrong_scope(Fiber* f, const void* p)
    {
        return violate(FailureKind::scope,
                       "device-scope atomic on memory of another rank: " + ranges_.describe(p) +
                           "\n  by: " + describe_thread(*f));
    }

    bool foreign(Fiber* f, const void* p)
    {
        return violate(FailureKind::foreign, "access to memory of another rank that is not shared: " +
                                                 ranges_.describe(p) +
                                                 "\n  by: " + describe_thread(*f));
    }

    bool misaligned(Fiber* f, const void* p, u32 bytes)
    {
        return violate(FailureKind::misaligned, "access of " + std::to_string(bytes) +
                                                    " bytes at " + ranges_.describe(p) +
                                                    "\n  by: " + describe_thread(*f));
    }

    bool out_of_range(Fiber* f, const void* p, u32 bytes)
    {
        return violate(FailureKind::out_of_range,
                       "access of " + std::to_string(bytes) + " bytes at " + ranges_.describe(p) +
                           " crosses its end\n  by: " + describe_thread(*f));
    }

    Slots slots_;
    Ranges& ranges_;
    Shadow shadow_;
    Violation violation_;
    std::vector<std::vector<Past>> history_;  // [rank], by first_time
    std::vector<u32> next_time_;              // [rank] where clocks of its next launch begin
    bool strict_;
};

}  // namespace emu
