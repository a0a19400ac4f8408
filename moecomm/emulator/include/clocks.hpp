// Happens-before by vector clocks, one component per thread.
//
// A thread's component is a slot: (rank, warp number in the launch, lane), used again by the next
// launch of that rank. That loses nothing, because all of a launch happens before the next one of
// its rank, and the slot's time goes on growing. So clocks stay as long as the largest launches of
// all ranks together, however many launches there are: kMostSlots in all, 32-bit time. The host of
// each rank has a slot too.
//
// What a thread knows of the others is an immutable clock that many threads share: after a barrier
// all of its threads point to the same one. A thread's own time stands beside it.
#pragma once

#include "abi.hpp"

#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

namespace emu {

constexpr u32 kMostSlots = 8192;
constexpr u32 kNobody = ~0u;

// Reference-counted array of times; slots past its end are at time 0.
class Clock {
public:
    Clock() = default;
    Clock(const Clock& other) : data_(other.data_)
    {
        if (data_) ++data_->references;
    }
    Clock(Clock&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
    Clock& operator=(Clock other) noexcept
    {
        std::swap(data_, other.data_);
        return *this;
    }
    ~Clock()
    {
        if (data_ && --data_->references == 0) std::free(data_);
    }

    u32 operator[](u32 slot) const { return slot < size() ? data_->times[slot] : 0; }
    u32 size() const { return data_ ? data_->size : 0; }
    u32 references() const { return data_ ? data_->references : 0; }
    bool same(const Clock& other) const { return data_ == other.data_; }

    bool at_most(const Clock& other) const
    {
        if (same(other)) return true;
        for (u32 i = 0; i < size(); ++i)
            if (data_->times[i] > other[i]) return false;
        return true;
    }

    // The following change this clock, which must be owned alone, or by those alone who want it.
    void raise(u32 slot, u32 time)
    {
        if (data_->times[slot] < time) data_->times[slot] = time;
    }
    void raise(const Clock& other)
    {
        u32* to = data_->times;
        const u32* from = other.data_ ? other.data_->times : nullptr;
        for (u32 first = 0; first < other.size(); first += 32)
            for (u32 i = first; i < first + 32; ++i) to[i] = to[i] < from[i] ? from[i] : to[i];
    }
    // Makes it owned alone and at least `slots` (a multiple of 32) long.
    void own(u32 slots)
    {
        if (references() == 1 && size() >= slots) return;
        const u32 old = size();
        const u32 n = slots > old ? slots : old;
        Data* fresh = static_cast<Data*>(std::malloc(sizeof(Data) + n * sizeof(u32)));
        if (!fresh) throw std::bad_alloc();
        fresh->references = 1;
        fresh->size = n;
        if (old) std::memcpy(fresh->times, data_->times, old * sizeof(u32));
        std::memset(fresh->times + old, 0, (n - old) * sizeof(u32));
        Clock dropped;
        dropped.data_ = std::exchange(data_, fresh);
    }

private:
    struct Data {
        u32 references;
        u32 size;
        u32 times[1];
    };
    Data* data_ = nullptr;
};

// Everything that happened before some release: `known`, and `slot` up to `time`.
struct Released {
    Clock known;
    u32 slot = kNobody;
    u32 time = 0;
    bool any = false;
};

// Whether all of `r` is in `clock`. (Who knows the release itself knows what came before it.)
inline bool covers(const Clock& clock, const Released& r)
{
    return r.slot != kNobody ? clock[r.slot] >= r.time : r.known.at_most(clock);
}

struct ThreadClock {
    Clock known;  // of the others
    u32 slot = kNobody;
    u32 now = 0;
    Released fenced;  // as of its last fence: what a relaxed store publishes
    Clock seen;       // what relaxed loads saw: a fence acquires it

    // Whether time `t` of `other` happened before now.
    bool after(u32 other, u32 t) const { return other == slot || known[other] >= t; }

    Released release()
    {
        Released r;
        r.known = known;
        r.slot = slot;
        r.time = now++;
        r.any = true;
        return r;
    }

    bool knows(const Released& r) const { return r.slot == slot || covers(known, r); }

    void acquire(const Released& r, u32 slots)
    {
        if (r.any && !knows(r)) join(known, r, slots);
    }

    static void join(Clock& into, const Released& r, u32 slots)
    {
        into.own(slots);
        into.raise(r.known);
        if (r.slot != kNobody) into.raise(r.slot, r.time);
    }
};

// `into` becomes the release of both: a read-modify-write continues what it read.
inline void merge(Released& into, const Released& r, u32 slots)
{
    if (!r.any) return;
    if (!into.any) {
        into = r;
        return;
    }
    Clock both = std::move(into.known);
    both.own(slots);
    if (into.slot != kNobody) both.raise(into.slot, into.time);
    ThreadClock::join(both, r, slots);
    into.known = std::move(both);
    into.slot = kNobody;
}

// All of `threads` learn what each of them knows and did: a barrier.
inline void join_all(const std::vector<ThreadClock*>& threads, u32 slots)
{
    if (threads.empty()) return;
    const Clock& first = threads[0]->known;
    size_t same = 0;
    for (const ThreadClock* t : threads) same += t->known.same(first);
    if (same == threads.size() && first.references() == same && first.size() == slots) {
        // They know the same already, and nobody else holds it: change it in place.
        for (ThreadClock* t : threads) t->known.raise(t->slot, t->now++);
        return;
    }
    Clock all = first;
    all.own(slots);
    const Clock* last = nullptr;
    for (const ThreadClock* t : threads) {
        if (!last || !t->known.same(*last)) all.raise(t->known);
        last = &t->known;
    }
    for (ThreadClock* t : threads) all.raise(t->slot, t->now++);
    for (ThreadClock* t : threads) t->known = all;
}

// Which slot is whose, and each rank's host.
class Slots {
public:
    explicit Slots(u32 num_ranks) : hosts_(num_ranks), warps_(num_ranks)
    {
        used_ = (num_ranks + 31) / 32 * 32;
        owner_.resize(used_ / 32);
        for (u32 r = 0; r < num_ranks; ++r) {
            hosts_[r].slot = r;
            hosts_[r].now = 1;
        }
    }

    u32 size() const { return used_; }
    ThreadClock& host(u32 rank) { return hosts_[rank]; }
    bool is_host(u32 slot) const { return slot < hosts_.size(); }

    // Makes room for a launch of so many warps. False: too many threads for the checks.
    bool reserve(u32 rank, u32 warps)
    {
        while (warps_[rank].size() < warps) {
            if (used_ + 32 > kMostSlots) return false;
            owner_.push_back({rank, static_cast<u32>(warps_[rank].size())});
            warps_[rank].push_back(used_ / 32);
            used_ += 32;
        }
        return true;
    }
    u32 slot(u32 rank, u32 warp, u32 lane) const { return warps_[rank][warp] * 32 + lane; }

    struct Owner {
        u32 rank = 0;
        u32 warp = 0;  // number in the launch
    };
    Owner owner(u32 slot) const { return owner_[slot / 32]; }

private:
    std::vector<ThreadClock> hosts_;
    std::vector<std::vector<u32>> warps_;  // [rank][warp] → slot / 32
    std::vector<Owner> owner_;
    u32 used_ = 0;
};

}  // namespace emu
