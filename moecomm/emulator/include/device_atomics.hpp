// CUDA's atomics: relaxed, device scope, on real atomic instructions.
#pragma once

#include "abi.hpp"
#include "device_memory.hpp"

#include <string.h>

namespace emu {

// Applies `next(old)` to *p until no other process came between. Returns the old value.
template <class T, class Next>
EMU_WITHIN T update(T* p, Order order, Scope scope, Next next)
{
    before_update(step(), p, sizeof(T), order, scope);
    T old = __atomic_load_n(p, __ATOMIC_RELAXED);
    const int success = order == Order::relaxed ? __ATOMIC_RELAXED : __ATOMIC_ACQ_REL;
    while (!__atomic_compare_exchange_n(p, &old, next(old), true, success, __ATOMIC_RELAXED)) {
    }
    return old;
}

template <class T>
EMU_WITHIN T add(T* p, T v)
{
    Thread* t = step();
    before_update(t, p, sizeof(T), Order::relaxed, Scope::device);
    return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}

template <class F, class Bits>
EMU_WITHIN F add_float(F* p, F v)
{
    const Bits old = update(reinterpret_cast<Bits*>(p), Order::relaxed, Scope::device,
                            [v](Bits bits) {
                                F f;
                                memcpy(&f, &bits, sizeof f);
                                f += v;
                                memcpy(&bits, &f, sizeof f);
                                return bits;
                            });
    F f;
    memcpy(&f, &old, sizeof f);
    return f;
}

}  // namespace emu

EMU_CALLED int atomicAdd(int* p, int v) { return emu::add(p, v); }
EMU_CALLED unsigned atomicAdd(unsigned* p, unsigned v) { return emu::add(p, v); }
EMU_CALLED unsigned long long atomicAdd(unsigned long long* p, unsigned long long v)
{
    return emu::add(p, v);
}
EMU_CALLED float atomicAdd(float* p, float v) { return emu::add_float<float, u32>(p, v); }
EMU_CALLED double atomicAdd(double* p, double v) { return emu::add_float<double, u64>(p, v); }
EMU_CALLED int atomicSub(int* p, int v) { return emu::add(p, -v); }
EMU_CALLED unsigned atomicSub(unsigned* p, unsigned v) { return emu::add(p, 0u - v); }

#define MOECOMM_EMU_ATOMIC(name, T, expression)                                       \
    EMU_CALLED T name(T* p, T v)                                                          \
    {                                                                                 \
        return emu::update(p, emu::Order::relaxed, emu::Scope::device, [v](T old) {   \
            return static_cast<T>(expression);                                        \
        });                                                                           \
    }
#define MOECOMM_EMU_ATOMIC_ALL(name, expression)           \
    MOECOMM_EMU_ATOMIC(name, int, expression)              \
    MOECOMM_EMU_ATOMIC(name, unsigned, expression)         \
    MOECOMM_EMU_ATOMIC(name, long long, expression)        \
    MOECOMM_EMU_ATOMIC(name, unsigned long long, expression)
MOECOMM_EMU_ATOMIC_ALL(atomicMax, old > v ? old : v)
MOECOMM_EMU_ATOMIC_ALL(atomicMin, old < v ? old : v)
MOECOMM_EMU_ATOMIC_ALL(atomicAnd, old & v)
MOECOMM_EMU_ATOMIC_ALL(atomicOr, old | v)
MOECOMM_EMU_ATOMIC_ALL(atomicXor, old ^ v)
MOECOMM_EMU_ATOMIC_ALL(atomicExch, ((void)old, v))
MOECOMM_EMU_ATOMIC(atomicInc, unsigned, old >= v ? 0u : old + 1u)
MOECOMM_EMU_ATOMIC(atomicDec, unsigned, old == 0 || old > v ? v : old - 1u)
#undef MOECOMM_EMU_ATOMIC_ALL
#undef MOECOMM_EMU_ATOMIC

#define MOECOMM_EMU_CAS(T)                                                                \
    EMU_CALLED T atomicCAS(T* p, T compare, T v)                                              \
    {                                                                                     \
        emu::before_update(emu::step(), p, sizeof(T), emu::Order::relaxed,                \
                           emu::Scope::device);                                           \
        __atomic_compare_exchange_n(p, &compare, v, false, __ATOMIC_RELAXED,              \
                                    __ATOMIC_RELAXED);                                    \
        return compare;                                                                   \
    }
MOECOMM_EMU_CAS(int)
MOECOMM_EMU_CAS(unsigned)
MOECOMM_EMU_CAS(unsigned long long)
#undef MOECOMM_EMU_CAS

// ---- wrappers of the kernels ----------------------------------------------------------------------
EMU_CALLED u32 atomic_inc_acq_rel_gpu(u32* p, u32 wrap)
{
    return emu::update(p, emu::Order::acq_rel, emu::Scope::device,
                       [wrap](u32 old) { return old >= wrap ? 0u : old + 1u; });
}

EMU_CALLED u32 atomic_add_acq_rel_gpu(u32* p, u32 value)
{
    return emu::update(p, emu::Order::acq_rel, emu::Scope::device,
                       [value](u32 old) { return old + value; });
}

EMU_CALLED u64 cas_relaxed_sys(u64* p, u64 compare, u64 value)
{
    emu::before_update(emu::step(), p, 8, emu::Order::relaxed, emu::Scope::system);
    __atomic_compare_exchange_n(p, &compare, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return compare;
}
