// One process's rank, or all ranks of a simulation: launches, and the loop that runs their threads.
#pragma once

#include "block.hpp"
#include "checks.hpp"
#include "clock.hpp"
#include "fuzz.hpp"
#include "ranges.hpp"
#include "scheduler.hpp"
#include "stacks.hpp"
#include "warp.hpp"

#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace emu {

enum class Event : u32 {
    budget = 0,    // the time or steps given to this call are used up
    finished = 1,  // a launch has ended
    failed = 2,    // see failure()
    died = 3,      // a fault has stopped a rank
    deadline = 4,  // a simulation's clock has reached the time given
    stalled = 5,   // no launch of a living rank is left
};

struct Failure {
    FailureKind kind = FailureKind::none;
    u32 rank = 0;
    std::string text;
};

struct Options {
    u32 num_ranks = 1;
    u32 simulation = 0;  // 0: one rank of several processes, real time
    u64 seed = 0;        // 0: fair
    u64 max_steps = 0;   // 0: kStepsLimit from launch to launch
    u32 checks = 0;      // 1: on; 2: warp collectives other than __syncwarp order nothing
    u32 unused = 0;
    FaultOptions faults;
};

// A simulation in which nothing but time has passed for this long will not go on.
constexpr u64 kIdleLimitNs = 3600ull * 1000000000ull;
// Nor will one in which no launch has begun or ended for so many steps (minutes).
constexpr u64 kStepsLimit = 2000000000;

struct Again {
    u64* word = nullptr;
    u64 value = 0;
    u64 at_step = 0;
};

constexpr u64 kTooManyThreads = ~0ull;  // instead of a launch's number

struct RankState {
    u64 steps = 0;
    bool dead = false;
};

extern const Api kApi;

struct World {
    explicit World(const Options& o)
        : options(o),
          scheduler(o.seed),
          ranks(o.num_ranks),
          checks(o.checks ? new Checks(o.num_ranks, ranges, o.checks == 2) : nullptr),
          fault_random_(o.seed)
    {
    }
    ~World() { abandon(); }

    // ---- for the host ---------------------------------------------------------------------------
    u64 launch(u32 rank, const Kernel* kernel, const void* args, const u64* config,
               u64 config_words, dim3 grid, dim3 block, u64 shared_bytes);
    Event step(u64 wall_ns, u64 deadline_ns);
    u64 take_finished();
    void abandon();  // drops all launches where they stand

    u64 time_ns() const { return options.simulation ? virtual_clock.now() : machine_time_ns(); }

    // ---- for device code, on a fiber --------------------------------------------------------------
    u64 block_barrier(Fiber* f, BarrierOp op, u32 predicate);
    u64 warp(Fiber* f, WarpOp op, u32 mask, u64 value, u32 source);
    void preempt(Fiber* f);
    void poll(Fiber* f);
    void data_load(Fiber* f, const void* from, void* to, u32 bytes);
    void data_store(Fiber* f, void* to, const void* from, u32 bytes);
    void atomic_load(Fiber* f, const void* p, u32 bytes, Order order, Scope scope);
    bool atomic_store(Fiber* f, void* p, u32 bytes, u64 value, Order order, Scope scope);
    u32 atomic_update(Fiber* f, void* p, u32 bytes, Order order, Scope scope);
    void raw_access(Fiber* f, const void* p, u32 bytes, bool write);
    void fence(Fiber* f);
    void finish(Fiber* f);
    [[noreturn]] void fail(Fiber* f, const char* what);
    // Ends the run. Set failure.text before: nothing on this stack is destroyed.
    [[noreturn]] void stop(FailureKind kind, const Fiber* f);
    void verify(bool ok, const Fiber* f);

    Options options;
    AnyScheduler scheduler;
    Stacks stacks;
    VirtualClock virtual_clock;
    Failure failure;
    Ranges ranges;
    std::vector<RankState> ranks;
    std::unique_ptr<Checks> checks;  // null: off
    std::map<u64, Released> host_releases;  // by the host's name for them
    std::vector<std::unique_ptr<Launch>> launches;  // not yet finished
    std::deque<u64> finished;
    u64 steps = 0;

private:
    u64 step_limit() const
    {
        return options.max_steps ? options.max_steps : launched_at_ + kStepsLimit;
    }
    Fiber* take_next();
    bool living(const Fiber* f);
    bool any_living() const;
    void stuck(FailureKind kind);
    void leave(Fiber* f);
    void pass_on(Fiber* f);
    void switch_to(Context& from, Fiber* to);
    void to_main(Context& from) { switch_context(from, main_); }
    Event idle(u64 deadline_ns);
    void complete_barrier(Block& b, Fiber* last);
    void complete_group(Block& b, u32 warp, u32 group, Fiber* last);
    void check_group(Fiber* f, const Warp& w, const WarpGroup& group, WarpOp op);
    void leave_warp(Fiber* f);
    void retire(Launch* launch);

    Context main_;
    Context nowhere_;         // where a finished fiber's registers go
    char* zombie_ = nullptr;  // stack of a finished fiber that is still in use
    u64 stop_at_ = 0;         // steps after which the main loop looks at the clock
    u64 next_id_ = 1;
    u64 idle_at_ = 0;         // the scheduler's progress when all were last idle ...
    u64 idle_turns_ = 0;      // ... and how often they have been since
    u64 launched_at_ = 0;     // steps when a launch last began or ended
    Random fault_random_;
    u64 num_releases_ = 0;
    Again again_;             // a flag store that a fault will do a second time
    std::vector<ThreadClock*> clocks_;  // scratch: who takes part in a barrier
    u32 died_ = ~0u;          // a rank whose death is yet to be reported
    std::vector<std::unique_ptr<Block>> spare_;
};

std::string describe_waits(World& w, u32* first_rank);  // report.hpp

inline Fiber* fiber(Thread* t) { return static_cast<Fiber*>(t); }

// First function on a fresh stack.
inline void fiber_main()
{
    Fiber* f = fiber(self());
    const Launch* launch = f->block->launch;
    World* w = f->world;
    try {
        launch->kernel->run(launch->args.data());
    } catch (const std::exception& error) {  // of the runtime: device code throws nothing
        w->failure.text = describe_thread(*f) + ": " + error.what();
        w->stop(FailureKind::out_of_memory, f);
    }
    w->finish(f);
}

// ---- launches -------------------------------------------------------------------------------------
inline u64 World::launch(u32 rank, const Kernel* kernel, const void* args, const u64* config,
                         u64 config_words, dim3 grid, dim3 block, u64 shared_bytes)
{
    std::unique_ptr<Launch> l(new Launch);
    l->id = next_id_++;
    l->rank = rank;
    l->world = this;
    l->kernel = kernel;
    l->name = kernel->name;
    l->args.resize(kernel->args_bytes / 8 + 1);
    std::memcpy(l->args.data(), args, kernel->args_bytes);
    l->config.assign(config, config + config_words);
    l->config.push_back(0);
    l->grid = grid;
    l->block = block;
    l->shared_bytes = shared_bytes;
    const u64 num_blocks = volume(grid);
    l->live_threads = num_blocks * volume(block);
    for (u64 i = 0; i < num_blocks; ++i) {
        if (spare_.empty()) spare_.emplace_back(new Block);
        l->blocks.push_back(std::move(spare_.back()));
        spare_.pop_back();
        prepare_block(*l->blocks.back(), *l, static_cast<u32>(i), &kApi);
    }
    if (checks && !checks->begin_launch(*l)) {
        retire(l.get());
        return kTooManyThreads;
    }
    for (auto& b : l->blocks)
        for (u32 i = 0; i < b->num_threads; ++i) scheduler.add(&b->fibers[i]);
    scheduler.note_progress();
    launched_at_ = steps;
    launches.push_back(std::move(l));
    return launches.back()->id;
}

inline void World::retire(Launch* launch)
{
    for (auto& b : launch->blocks) spare_.push_back(std::move(b));
    for (size_t i = 0; i < launches.size(); ++i)
        if (launches[i].get() == launch) {
            launches.erase(launches.begin() + static_cast<std::ptrdiff_t>(i));
            return;
        }
}

inline u64 World::take_finished()
{
    const u64 id = finished.front();
    finished.pop_front();
    launched_at_ = steps;
    for (auto& l : launches)
        if (l->id == id) {
            if (checks) checks->end_launch(*l);
            retire(l.get());
            break;
        }
    return id;
}

// Device code holds nothing that needs a destructor: its stacks are simply taken back.
inline void World::abandon()
{
    scheduler.clear();
    while (!launches.empty()) {
        for (auto& b : launches.back()->blocks)
            for (u32 i = 0; i < b->num_threads; ++i) {
                Fiber& f = b->fibers[i];
                if (f.stack) stacks.give_back(f.stack);
                f.stack = nullptr;
            }
        retire(launches.back().get());
    }
    finished.clear();
    failure = Failure();
    if (zombie_) stacks.give_back(zombie_);
    zombie_ = nullptr;
}

// ---- the loop ---------------------------------------------------------------------------------------
// Counts a step of the fiber's rank. False: a fault has stopped that rank; its fibers are dropped.
inline bool World::living(const Fiber* f)
{
    const u32 rank = f->block->launch->rank;
    RankState& state = ranks[rank];
    if (state.dead) return false;
    if (rank == options.faults.dead_rank && state.steps >= options.faults.dead_after_steps) {
        state.dead = true;
        died_ = rank;
        return false;
    }
    ++state.steps;
    return true;
}

inline bool World::any_living() const
{
    for (const auto& l : launches)
        if (!ranks[l->rank].dead) return true;
    return false;
}

inline Fiber* World::take_next()
{
    if (steps >= stop_at_ || failure.kind != FailureKind::none) return nullptr;
    if (again_.word && steps >= again_.at_step) {
        __atomic_store_n(again_.word, again_.value, __ATOMIC_RELEASE);
        again_.word = nullptr;
        scheduler.note_progress();
    }
    for (;;) {
        Fiber* f = scheduler.next();
        if (!f) return nullptr;
        if (!options.simulation || living(f)) {
            ++steps;
            virtual_clock.step();
            scheduler.resumed(f);
            return f;
        }
        if (died_ != ~0u) return nullptr;
    }
}

inline void World::switch_to(Context& from, Fiber* to)
{
    if (to->stack) {
        switch_context(from, to->context);
        return;
    }
    char* low = stacks.take();
    to->stack = low;
    Stacks::set_thread(low, to);
    enter_stack(from, to->context, low, Stacks::top(low), fiber_main);
}

// `f` is queued or parked: runs others until its turn comes.
inline void World::leave(Fiber* f)
{
    Fiber* next = take_next();
    if (next == f) return;
    if (next)
        switch_to(f->context, next);
    else
        to_main(f->context);
}

// `f` could go on: with fuzzing, maybe later.
inline void World::pass_on(Fiber* f)
{
    if (!scheduler.fuzzes()) return;
    scheduler.add(f);
    leave(f);
}

inline Event World::step(u64 wall_ns, u64 deadline_ns)
{
    const u64 begin = machine_time_ns();
    for (;;) {
        stop_at_ = steps + (1 << 14);
        if (options.simulation && stop_at_ > step_limit()) stop_at_ = step_limit();
        Fiber* f = take_next();
        if (f) {
            switch_to(main_, f);
            if (zombie_) stacks.give_back(zombie_);
            zombie_ = nullptr;
        }
        if (failure.kind != FailureKind::none) return Event::failed;
        if (!finished.empty()) return Event::finished;
        if (died_ != ~0u) {
            died_ = ~0u;
            return Event::died;
        }
        if (deadline_ns && time_ns() >= deadline_ns) return Event::deadline;
        if (!f && steps < stop_at_) {
            const Event e = idle(deadline_ns);
            if (e != Event::budget) return e;
        } else if (options.simulation && steps >= step_limit()) {
            stuck(FailureKind::step_limit);
            return Event::failed;
        }
        if (machine_time_ns() - begin >= wall_ns) return Event::budget;
    }
}

// Nobody is ready.
inline Event World::idle(u64 deadline_ns)
{
    if (scheduler.thaw()) return Event::budget;
    if (!any_living()) return Event::stalled;
    if (scheduler.num_polling() == 0) {
        stuck(FailureKind::deadlock);
        return Event::failed;
    }
    if (scheduler.progress() != idle_at_) {
        idle_at_ = scheduler.progress();
        idle_turns_ = 0;
        virtual_clock.progressed();
    }
    if (options.simulation) {
        virtual_clock.jump(deadline_ns);
        if (virtual_clock.idle_ns() > kIdleLimitNs) {
            stuck(FailureKind::deadlock);
            return Event::failed;
        }
    } else {
        nap(idle_turns_++);
    }
    scheduler.repoll();
    return Event::budget;
}

inline void World::stuck(FailureKind kind)
{
    failure.kind = kind;
    failure.text = describe_waits(*this, &failure.rank);
}

// ---- what fibers do -----------------------------------------------------------------------------------
inline void World::preempt(Fiber* f)
{
    if (f->wrote) {
        f->wrote = 0;
        scheduler.note_progress();
    }
    scheduler.preempted(f);
    leave(f);
}

inline void World::poll(Fiber* f)
{
    scheduler.poll(f);
    leave(f);
}

inline void World::finish(Fiber* f)
{
    f->state = State::done;
    f->wrote = 0;
    f->delayed.let_out_all();
    scheduler.note_progress();
    Block& b = *f->block;
    --b.alive;
    if (b.alive && b.barrier.arrived == b.alive) complete_barrier(b, nullptr);
    leave_warp(f);
    if (!stacks.intact(f->stack)) {
        failure.kind = FailureKind::stack_overflow;
        failure.rank = b.launch->rank;
        failure.text = describe_thread(*f) + " used more than its stack";
    }
    if (--b.launch->live_threads == 0) finished.push_back(b.launch->id);
    char* stack = f->stack;
    f->stack = nullptr;
    Fiber* next = finished.empty() && kReenterStack ? take_next() : nullptr;
    if (next) {
        stacks.give_back(stack);  // `next` may begin on it: nothing here is needed any more
        switch_to(nowhere_, next);
    } else {
        zombie_ = stack;
        to_main(nowhere_);
    }
    __builtin_unreachable();
}

inline void World::fail(Fiber* f, const char* what)
{
    failure.text = describe_thread(*f) + ": " + what;
    stop(FailureKind::kernel_error, f);
}

inline void World::stop(FailureKind kind, const Fiber* f)
{
    failure.kind = kind;
    failure.rank = f->block->launch->rank;
    to_main(nowhere_);
    __builtin_unreachable();
}

}  // namespace emu
