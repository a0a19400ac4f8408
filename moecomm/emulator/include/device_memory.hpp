// Loads and stores of memory that other threads, ranks or processes may touch.
//
// Flags are real atomic operations: in the process mode the other ranks are other processes on the
// same memory. Data accesses are plain, as on the GPU. With checks on, each call tells the runtime
// what it does, which then also performs data accesses (stores may be held back by a fault).
#pragma once

#include "abi.hpp"

#include <string.h>

namespace emu {

EMU_WITHIN void before_load(Thread* t, const void* p, u32 bytes, Order order, Scope scope)
{
    t->polled = p;
    if (MOECOMM_EMULATOR_CHECKS) t->api->atomic_load(t, p, bytes, order, scope);
}

EMU_WITHIN bool before_store(Thread* t, void* p, u32 bytes, u64 value, Order order, Scope scope)
{
    t->wrote = 1;
    return !MOECOMM_EMULATOR_CHECKS || t->api->atomic_store(t, p, bytes, value, order, scope);
}

EMU_WITHIN u32 before_update(Thread* t, void* p, u32 bytes, Order order, Scope scope)
{
    t->wrote = 1;
    return MOECOMM_EMULATOR_CHECKS ? t->api->atomic_update(t, p, bytes, order, scope) : 1;
}

template <class T>
EMU_WITHIN T load(const T* p)
{
    static_assert(sizeof(T) <= 16 && !(sizeof(T) & (sizeof(T) - 1)), "1, 2, 4, 8 or 16 bytes");
    Thread* t = step();
    T v;
    if (MOECOMM_EMULATOR_CHECKS)
        t->api->data_load(t, p, &v, sizeof(T));
    else
        memcpy(&v, p, sizeof(T));
    return v;
}

template <class T>
EMU_WITHIN void store(T* p, T v)
{
    static_assert(sizeof(T) <= 16 && !(sizeof(T) & (sizeof(T) - 1)), "1, 2, 4, 8 or 16 bytes");
    Thread* t = step();
    t->wrote = 1;
    if (MOECOMM_EMULATOR_CHECKS)
        t->api->data_store(t, p, &v, sizeof(T));
    else
        memcpy(p, &v, sizeof(T));
}

template <class T>
struct NoDeduction {
    typedef T type;
};

}  // namespace emu

// ---- flags: 8-byte words, system scope ----------------------------------------------------------
EMU_CALLED u64 ld_acquire_sys(const u64* p)
{
    emu::before_load(emu::step(), p, 8, emu::Order::acquire, emu::Scope::system);
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

EMU_CALLED u64 ld_relaxed_sys(const u64* p)
{
    emu::before_load(emu::step(), p, 8, emu::Order::relaxed, emu::Scope::system);
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}

EMU_CALLED void st_release_sys(u64* p, u64 v)
{
    if (emu::before_store(emu::step(), p, 8, v, emu::Order::release, emu::Scope::system))
        __atomic_store_n(p, v, __ATOMIC_RELEASE);
}

EMU_CALLED void st_relaxed_sys(u64* p, u64 v)
{
    if (emu::before_store(emu::step(), p, 8, v, emu::Order::relaxed, emu::Scope::system))
        __atomic_store_n(p, v, __ATOMIC_RELAXED);
}

EMU_CALLED void red_release_sys_add(u64* p, u64 v)
{
    u32 times = emu::before_update(emu::step(), p, 8, emu::Order::release, emu::Scope::system);
    for (; times; --times) __atomic_fetch_add(p, v, __ATOMIC_RELEASE);
}

// ---- data ---------------------------------------------------------------------------------------
template <class T>
EMU_CALLED T ld(const T* p)
{
    return emu::load(p);
}

template <class T>
EMU_CALLED void st(T* p, typename emu::NoDeduction<T>::type v)
{
    emu::store(p, v);
}

EMU_CALLED uint4 ld_v4(const void* p) { return emu::load(static_cast<const uint4*>(p)); }
EMU_CALLED void st_v4(void* p, uint4 v) { emu::store(static_cast<uint4*>(p), v); }

template <class T>
EMU_CALLED T __ldg(const T* p)
{
    return emu::load(p);
}

// ---- fences ---------------------------------------------------------------------------------------
EMU_CALLED void __threadfence_system()
{
    emu::Thread* t = emu::step();
    t->api->fence(t, emu::Scope::system);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
EMU_CALLED void __threadfence()
{
    emu::Thread* t = emu::step();
    t->api->fence(t, emu::Scope::device);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
EMU_CALLED void __threadfence_block()
{
    emu::Thread* t = emu::step();
    t->api->fence(t, emu::Scope::device);
}

// ---- waiting --------------------------------------------------------------------------------------
EMU_CALLED u64 global_timer_ns()
{
    emu::Thread* t = emu::step();
    return t->api->time_ns(t);
}

// One turn of a waiting loop: lets others run. Always true: look at the clock and the abort word.
EMU_CALLED bool poll_pause(u32)
{
    emu::Thread* t = emu::self();
    emu::note_place(t);
    t->api->poll(t);
    return true;
}

EMU_CALLED void __nanosleep(unsigned int)
{
    emu::Thread* t = emu::self();
    emu::note_place(t);
    t->api->poll(t);
}

// This thread works for `epoch`: what it reads from "symmetric" ranges must be of that epoch.
EMU_CALLED void note_epoch(u64 epoch)
{
    emu::Thread* t = emu::self();
    t->api->note_epoch(t, epoch);
}

// This thread is about to wait for *address to reach `expected`; only reports use it.
EMU_CALLED void note_wait(const u64* address, u64 expected)
{
    emu::Thread* t = emu::self();
    t->api->note_wait(t, address, expected);
}
