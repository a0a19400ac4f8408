// Which fiber runs next.
//
// A fiber is ready, polling (it saw that what it waits for is not there yet) or parked at a barrier
// (then no scheduler knows it). `progress` counts everything that could end somebody's wait: writes
// and finished threads; not barriers, which a waiting loop may contain. A poller is idle if nothing
// has happened since its poll began; when all are idle and nobody is ready, only time, or another
// process, can change anything.
#pragma once

#include "fiber.hpp"

#include <vector>

namespace emu {

// What both schedulers share. Derived has:
//   add(f)        a fresh fiber: behind all others
//   preempted(f)  it could go on: behind all others
//   wake(f)       what it waited for has happened: before all others
//   next()        the next to run; null: nobody, unless time passes or memory changes from outside
//   repoll()      time has passed: all pollers shall look again
//   thaw()        lets frozen fibers run again; false: there are none
//   fuel()        wrapper calls until the running fiber is preempted
//   clear(), num_polling(), add_polling(f)
template <class Derived>
class Scheduler {
public:
    void note_progress() { ++progress_; }
    u64 progress() const { return progress_; }

    // `f` has polled: it waits for its turn again.
    void poll(Fiber* f)
    {
        if (f->wrote) {
            f->wrote = 0;
            note_progress();
        }
        f->state = State::polling;
        if (counted_at_ != progress_) {
            counted_at_ = progress_;
            forget_idle();
        }
        if (f->poll_began == progress_) {
            f->idle_count = count_;
            ++num_idle_;
        }
        derived().add_polling(f);
    }

    // `f` runs now. What a preempted poller has read may be old: only a poll that starts now counts.
    void resumed(Fiber* f)
    {
        if (f->state == State::polling) f->poll_began = progress_;
        f->state = State::ready;
        f->fuel = derived().fuel();
    }

protected:
    bool all_idle() const
    {
        return counted_at_ == progress_ &&
               num_idle_ == static_cast<const Derived*>(this)->num_polling();
    }
    // `f` leaves the pollers.
    void forget_idle(Fiber* f)
    {
        if (f->idle_count == count_) --num_idle_;
        f->idle_count = 0;
    }
    // All must poll again to count as idle.
    void forget_idle()
    {
        ++count_;
        num_idle_ = 0;
    }

private:
    Derived& derived() { return *static_cast<Derived*>(this); }

    u64 progress_ = 1;
    u64 counted_at_ = 0;  // the progress for which num_idle_ holds
    u64 count_ = 1;       // numbers the counts; a fiber keeps the one that it is in
    size_t num_idle_ = 0;
};

class FiberList {
public:
    bool empty() const { return !head_; }
    size_t size() const { return size_; }
    void push_back(Fiber* f)
    {
        f->next = nullptr;
        if (head_)
            tail_->next = f;
        else
            head_ = f;
        tail_ = f;
        ++size_;
    }
    void push_front(Fiber* f)
    {
        f->next = head_;
        head_ = f;
        if (!tail_ || !f->next) tail_ = f;
        ++size_;
    }
    Fiber* pop_front()
    {
        Fiber* f = head_;
        head_ = f->next;
        if (!head_) tail_ = nullptr;
        --size_;
        return f;
    }

private:
    Fiber* head_ = nullptr;
    Fiber* tail_ = nullptr;
    size_t size_ = 0;
};

// Runs each fiber until it blocks or polls (or has made very many accesses: it may be a loop that
// waits without poll_pause). Woken fibers go first: their stacks are in the cache.
class FairScheduler final : public Scheduler<FairScheduler> {
public:
    void add(Fiber* f) { ready_.push_back(f); }
    void wake(Fiber* f) { ready_.push_front(f); }
    // It may well wait in a loop of its own: those who poll must not wait for it.
    void preempted(Fiber* f)
    {
        repoll();
        ready_.push_back(f);
    }
    Fiber* next()
    {
        if (ready_.empty()) {
            if (polling_.empty() || all_idle()) return nullptr;
            repoll();
        }
        return ready_.pop_front();
    }
    void repoll()
    {
        while (!polling_.empty()) ready_.push_back(polling_.pop_front());
        forget_idle();
    }
    long long fuel() { return 4096; }
    void clear()
    {
        ready_ = FiberList();
        polling_ = FiberList();
        forget_idle();
    }
    size_t num_polling() const { return polling_.size(); }

    bool thaw() { return false; }
    void add_polling(Fiber* f) { polling_.push_back(f); }

private:
    FiberList ready_;
    FiberList polling_;
};

}  // namespace emu
