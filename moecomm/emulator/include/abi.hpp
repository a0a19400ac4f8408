// What compiled kernels and the runtime agree on.
//
// Kernels and runtime are separate shared objects: one simulation may run kernels of several
// programs, and a program compiles fast because it sees only the `device_*.hpp` headers. A program
// has no undefined symbols and no state: everything is reached from `self()`, the running CUDA
// thread, which is found from the stack pointer. (A thread-local pointer would not do: compilers
// keep the address of a thread-local across a context switch.)
#pragma once

#include "device_types.hpp"

namespace emu {

// Every fiber's stack is this large and aligned to its size; its last word points to the Thread.
// 128 KiB leaves 64 KiB beside a guard page of 64 KiB (some aarch64 kernels). Stacks are
// committed page by page as they are touched.
constexpr size_t kStackBytes = 128 * 1024;

enum class BarrierOp : u32 { plain, any, all, count };

enum class WarpOp : u32 { sync, shuffle, shuffle_up, shuffle_down, shuffle_xor, ballot, any, all,
                          match_any, match_all, reduce_add, reduce_min, reduce_max, reduce_and,
                          reduce_or, reduce_xor };

enum class Order : u32 { relaxed, acquire, release, acq_rel };
enum class Scope : u32 { device, system };

struct Thread;

// Calls from device code into the runtime.
struct Api {
    u64 (*block_barrier)(Thread*, BarrierOp, u32 predicate);
    u64 (*warp)(Thread*, WarpOp, u32 mask, u64 value, u32 source_lane);
    void (*preempt)(Thread*);
    void (*poll)(Thread*);
    u64 (*time_ns)(Thread*);
    void (*note_epoch)(Thread*, u64 epoch);
    void (*note_wait)(Thread*, const u64* address, u64 expected);
    void (*fence)(Thread*, Scope);
    // Called by programs built with MOECOMM_EMULATOR_CHECKS only, before the access itself ...
    void (*data_load)(Thread*, const void* from, void* to, u32 bytes);   // ... and does it
    void (*data_store)(Thread*, void* to, const void* from, u32 bytes);  // ... and does it
    void (*atomic_load)(Thread*, const void*, u32 bytes, Order, Scope);
    // True: do the store; false: a fault drops it.
    bool (*atomic_store)(Thread*, void*, u32 bytes, u64 value, Order, Scope);
    // An access that goes through no wrapper: shared memory, mostly. Checks it only.
    void (*raw_access)(Thread*, const void*, u32 bytes, bool write);
    // How often to do the read-modify-write: 1, or what a fault says (`value` is added again).
    u32 (*atomic_update)(Thread*, void*, u32 bytes, Order, Scope);
    // Ends the run: device code itself found something wrong. Does not return.
    void (*fail)(Thread*, const char* what);
};

// A CUDA thread, as far as device code sees it. The runtime's Fiber begins with it.
struct Thread {
    const Api* api;
    const u64* config;
    u64 config_bytes;
    void* shared;        // dynamic shared memory of the block
    long long fuel;      // wrapper calls left until the scheduler takes a turn
    const void* pc;      // kernel code that called the last wrapper; with checks only
    const void* caller;  // where to say that it was, instead; see note_caller
    const void* polled;  // last word read by an atomic load: what a stuck thread waits for
    u32 wrote;           // it did something that others may wait for since it was resumed
    u32 lane;
    uint3 thread_idx;
    uint3 block_idx;
    dim3 block_dim;
    dim3 grid_dim;
};

EMU_CALLED Thread* self()
{
    uintptr_t sp;
#if defined(__x86_64__)
    asm("movq %%rsp, %0" : "=r"(sp));
#elif defined(__aarch64__)
    asm("mov %0, sp" : "=r"(sp));
#else
    sp = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
#endif
    return *reinterpret_cast<Thread**>((sp | (kStackBytes - 1)) + 1 - sizeof(Thread*));
}

// Where kernel code called the wrapper that this is part of; known with checks only.
EMU_WITHIN void note_place(Thread* t)
{
    if (MOECOMM_EMULATOR_CHECKS) t->pc = t->caller ? t->caller : __builtin_return_address(0);
}

// Each wrapper call comes through here: the place where a scheduler may switch threads.
EMU_WITHIN Thread* step()
{
    Thread* t = self();
    note_place(t);
    if (__builtin_expect(--t->fuel < 0, 0)) t->api->preempt(t);
    return t;
}

// For code that is called from another language: reports are to name `place`, its caller, and not
// the code itself.
EMU_WITHIN void note_caller(const void* place)
{
    if (MOECOMM_EMULATOR_CHECKS) self()->caller = place;
}

EMU_CALLED const u64* config() { return self()->config; }

// Whether the program is loaded: only then does its code run on fibers.
EMU_CALLED bool& loaded()
{
    static bool flag = false;
    return flag;
}

// ---- what a program exports -------------------------------------------------------------------
struct Kernel {
    const char* name;
    void (*run)(const void* args);  // one thread
    u64 args_bytes;
};

template <class Args>
constexpr u64 args_bytes(void (*)(Args))
{
    return sizeof(Args);
}
constexpr u64 args_bytes(void (*)()) { return 0; }

template <class Args>
EMU_CALLED void call(void (*kernel)(Args), const void* blob)
{
    alignas(Args) unsigned char copy[sizeof(Args)];
    __builtin_memcpy(copy, blob, sizeof(Args));  // by value, as a launch does
    kernel(*reinterpret_cast<Args*>(copy));
}
EMU_CALLED void call(void (*kernel)(), const void*) { kernel(); }

}  // namespace emu
