// The unfair scheduler: for a seed, always the same run; over seeds, everything that may happen.
//
// Shuffled round robin finds few ordering mistakes. What finds them is one part running far ahead
// of another, so time is cut into epochs, and in most of them some ranks, blocks or warps are
// frozen: for a while, or until all others can only wait. Threads also lose their turn inside
// wrapper calls, every second or every thousandth, by epoch.
#pragma once

#include "block.hpp"
#include "scheduler.hpp"

#include <memory>
#include <vector>

namespace emu {

// splitmix64: any seed is good, and the stream is the same everywhere.
class Random {
public:
    explicit Random(u64 seed) : state_(seed) {}
    u64 next()
    {
        u64 z = (state_ += 0x9e3779b97f4a7c15ull);
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        return z ^ z >> 31;
    }
    u64 below(u64 n) { return static_cast<u64>(static_cast<u32>(next())) * n >> 32; }  // n < 2^32
    bool chance(u32 in) { return below(in) == 0; }

private:
    u64 state_;
};

class FuzzScheduler final : public Scheduler<FuzzScheduler> {
public:
    explicit FuzzScheduler(u64 seed) : random_(seed) {}

    void add(Fiber* f) { place(f); }
    void preempted(Fiber* f) { place(f); }
    void wake(Fiber* f) { place(f); }

    Fiber* next()
    {
        for (;;) {
            if (epoch_left_ == 0) start_epoch();
            --epoch_left_;
            if (!active_.empty()) {
                const bool poller = !polling_.empty() && random_.chance(8);
                if (!poller) return take(active_);
                Fiber* f = take(polling_);
                forget_idle(f);
                return f;
            }
            if (polling_.empty() || all_idle()) return nullptr;
            repoll();
        }
    }

    void repoll()
    {
        for (Fiber* f : polling_) active_.push_back(f);
        polling_.clear();
        forget_idle();
    }

    bool thaw()
    {
        if (frozen_.empty()) return false;
        start_epoch();
        return true;
    }

    long long fuel() { return static_cast<long long>(random_.below(2 * mean_fuel_)); }

    void clear()
    {
        active_.clear();
        polling_.clear();
        frozen_.clear();
        forget_idle();
    }

    size_t num_polling() const { return polling_.size(); }
    void add_polling(Fiber* f) { polling_.push_back(f); }

private:
    enum class Freeze : u32 { nobody, ranks, all_but_one_rank, blocks, one_block, warps };

    void place(Fiber* f) { (runs(f) ? active_ : frozen_).push_back(f); }

    Fiber* take(std::vector<Fiber*>& from)
    {
        const size_t i = random_.below(from.size());
        Fiber* f = from[i];
        from[i] = from.back();
        from.pop_back();
        return f;
    }

    void start_epoch()
    {
        static constexpr Freeze kinds[8] = {Freeze::nobody, Freeze::nobody, Freeze::ranks,
                                            Freeze::all_but_one_rank, Freeze::blocks,
                                            Freeze::blocks, Freeze::one_block, Freeze::warps};
        static constexpr u64 fuels[4] = {2, 8, 64, 1024};
        kind_ = kinds[random_.below(8)];
        salt_ = random_.next();
        runs_in_8_ = 1 + random_.below(7);
        mean_fuel_ = fuels[random_.below(4)];

        std::vector<Fiber*> all;
        all.swap(active_);
        all.insert(all.end(), polling_.begin(), polling_.end());
        all.insert(all.end(), frozen_.begin(), frozen_.end());
        polling_.clear();
        frozen_.clear();
        forget_idle();
        pick_one(all);
        for (Fiber* f : all) {
            if (!runs(f))
                frozen_.push_back(f);
            else
                (f->state == State::polling ? polling_ : active_).push_back(f);
        }
        const u64 turns = all.empty() ? 16 : all.size();
        epoch_left_ = random_.chance(4) ? turns * 4096 : turns * (1 + random_.below(16));
    }

    // For the kinds that single somebody out.
    void pick_one(const std::vector<Fiber*>& all)
    {
        if (all.empty()) return;
        const Fiber* f = all[random_.below(all.size())];
        one_rank_ = f->block->launch->rank;
        one_launch_ = f->block->launch->id;
        one_block_ = f->block->number;
    }

    bool drawn(u64 key) const { return (Random(salt_ ^ key * 0xd1342543de82ef95ull).next() & 7) < runs_in_8_; }

    bool runs(const Fiber* f) const
    {
        const Launch& l = *f->block->launch;
        switch (kind_) {
            case Freeze::nobody: return true;
            case Freeze::ranks: return drawn(l.rank);
            case Freeze::all_but_one_rank: return l.rank == one_rank_;
            case Freeze::blocks: return drawn(l.id << 20 | f->block->number);
            case Freeze::one_block: return l.id != one_launch_ || f->block->number != one_block_;
            default: return drawn((l.id << 20 | f->block->number) << 8 | f->index / kWarp);
        }
    }

    Random random_;
    std::vector<Fiber*> active_;   // may run (a poller among them is to look again)
    std::vector<Fiber*> polling_;
    std::vector<Fiber*> frozen_;   // of any state
    u64 epoch_left_ = 0;           // turns
    Freeze kind_ = Freeze::nobody;
    u64 salt_ = 0;
    u64 runs_in_8_ = 8;
    u64 mean_fuel_ = 64;
    u32 one_rank_ = 0;
    u64 one_launch_ = 0;
    u32 one_block_ = 0;
};

// The scheduler of a world. Not a base class with virtual functions: a switch between threads costs
// some 20 ns, of which calls that cannot be inlined would be a third.
class AnyScheduler {
public:
    explicit AnyScheduler(u64 seed)
    {
        if (seed) fuzz_.reset(new FuzzScheduler(seed));
    }
    bool fuzzes() const { return fuzz_ != nullptr; }

    Fiber* next() { return fuzz_ ? fuzz_->next() : fair_.next(); }
    void resumed(Fiber* f) { fuzz_ ? fuzz_->resumed(f) : fair_.resumed(f); }
    void add(Fiber* f) { fuzz_ ? fuzz_->add(f) : fair_.add(f); }
    void preempted(Fiber* f) { fuzz_ ? fuzz_->preempted(f) : fair_.preempted(f); }
    void wake(Fiber* f) { fuzz_ ? fuzz_->wake(f) : fair_.wake(f); }
    void poll(Fiber* f) { fuzz_ ? fuzz_->poll(f) : fair_.poll(f); }
    void repoll() { fuzz_ ? fuzz_->repoll() : fair_.repoll(); }
    bool thaw() { return fuzz_ ? fuzz_->thaw() : fair_.thaw(); }
    void clear() { fuzz_ ? fuzz_->clear() : fair_.clear(); }
    size_t num_polling() const { return fuzz_ ? fuzz_->num_polling() : fair_.num_polling(); }
    void note_progress() { fuzz_ ? fuzz_->note_progress() : fair_.note_progress(); }
    u64 progress() const { return fuzz_ ? fuzz_->progress() : fair_.progress(); }

private:
    FairScheduler fair_;
    std::unique_ptr<FuzzScheduler> fuzz_;
};

}  // namespace emu
