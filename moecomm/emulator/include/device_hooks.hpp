// Receives what the compiler's thread-sanitizer instrumentation reports: every access that device
// code makes by itself, which is how shared memory is used. No sanitizer library is linked.
#pragma once

#include "abi.hpp"

#include <string.h>

#if MOECOMM_EMULATOR_CHECKS

namespace emu {

EMU_WITHIN bool on_own_stack(const void* p)
{
    const uintptr_t here = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
    return (reinterpret_cast<uintptr_t>(p) ^ here) < kStackBytes;
}

EMU_WITHIN void raw_access(const void* p, u32 bytes, bool write)
{
    if (on_own_stack(p) || !loaded()) return;  // not loaded: a static initialiser
    Thread* t = self();
    const uintptr_t at = reinterpret_cast<uintptr_t>(p);
    if (at - reinterpret_cast<uintptr_t>(t) < sizeof(Thread)) return;
    if (at - reinterpret_cast<uintptr_t>(t->config) < t->config_bytes) return;
    step();
    if (write) t->wrote = 1;
    t->api->raw_access(t, p, bytes, write);
}

// In pieces that are aligned to their size.
EMU_WITHIN void raw_range(const void* p, u64 bytes, bool write)
{
    if (on_own_stack(p)) return;
    const char* at = static_cast<const char*>(p);
    while (bytes) {
        u32 piece = 16;
        while (piece > bytes || reinterpret_cast<uintptr_t>(at) % piece) piece /= 2;
        raw_access(at, piece, write);
        at += piece;
        bytes -= piece;
    }
}

// Not loops that the compiler would turn into the very calls that they are part of.
EMU_WITHIN void* copy_bytes(void* to, const void* from, u64 bytes)
{
    raw_range(from, bytes, false);
    raw_range(to, bytes, true);
    char* t = static_cast<char*>(to);
    const char* f = static_cast<const char*>(from);
    if (t - f >= 8 || f - t >= 8) {
        const bool up = t < f;
        for (; bytes >= 8; bytes -= 8) {
            const u64 at = up ? 0 : bytes - 8;
            u64 word;
            __builtin_memcpy(&word, f + at, 8);
            __builtin_memcpy(t + at, &word, 8);
            asm volatile("" ::: "memory");
            if (up) t += 8, f += 8;
        }
    }
    const bool up = t <= f;
    for (u64 i = 0; i < bytes; ++i) {
        const u64 at = up ? i : bytes - 1 - i;
        t[at] = f[at];
        asm volatile("" ::: "memory");
    }
    return to;
}

EMU_WITHIN void* fill_bytes(void* to, int value, u64 bytes)
{
    raw_range(to, bytes, true);
    for (u64 i = 0; i < bytes; ++i) {
        static_cast<char*>(to)[i] = static_cast<char>(value);
        asm volatile("" ::: "memory");
    }
    return to;
}

}  // namespace emu

#define MOECOMM_EMU_HOOK __attribute__((no_sanitize("thread"), used))
#define MOECOMM_EMU_HOOKS(n)                                                                    \
    extern "C" MOECOMM_EMU_HOOK void __tsan_read##n(void* p) { emu::raw_access(p, n, false); }  \
    extern "C" MOECOMM_EMU_HOOK void __tsan_write##n(void* p) { emu::raw_access(p, n, true); }  \
    extern "C" MOECOMM_EMU_HOOK void __tsan_volatile_read##n(void* p)                           \
    {                                                                                           \
        emu::raw_access(p, n, false);                                                           \
    }                                                                                           \
    extern "C" MOECOMM_EMU_HOOK void __tsan_volatile_write##n(void* p)                          \
    {                                                                                           \
        emu::raw_access(p, n, true);                                                            \
    }                                                                                           \
    extern "C" MOECOMM_EMU_HOOK void __tsan_unaligned_read##n(void* p)                          \
    {                                                                                           \
        emu::raw_range(p, n, false);                                                            \
    }                                                                                           \
    extern "C" MOECOMM_EMU_HOOK void __tsan_unaligned_write##n(void* p)                         \
    {                                                                                           \
        emu::raw_range(p, n, true);                                                             \
    }
MOECOMM_EMU_HOOKS(1)
MOECOMM_EMU_HOOKS(2)
MOECOMM_EMU_HOOKS(4)
MOECOMM_EMU_HOOKS(8)
MOECOMM_EMU_HOOKS(16)
#undef MOECOMM_EMU_HOOKS
extern "C" MOECOMM_EMU_HOOK void __tsan_read_range(void* p, unsigned long bytes)
{
    emu::raw_range(p, bytes, false);
}
extern "C" MOECOMM_EMU_HOOK void __tsan_write_range(void* p, unsigned long bytes)
{
    emu::raw_range(p, bytes, true);
}
// clang calls these; g++ calls the library's functions, of which this program has its own (it is
// linked with -Bsymbolic). They stand for loops and assignments of structures too.
#define MOECOMM_EMU_COPIES(prefix)                                                                \
    extern "C" MOECOMM_EMU_HOOK void* prefix##memcpy(void* to, const void* from, size_t bytes)    \
        MOECOMM_EMU_NOTHROW                                                                       \
    {                                                                                             \
        return emu::copy_bytes(to, from, bytes);                                                  \
    }                                                                                             \
    extern "C" MOECOMM_EMU_HOOK void* prefix##memmove(void* to, const void* from, size_t bytes)   \
        MOECOMM_EMU_NOTHROW                                                                       \
    {                                                                                             \
        return emu::copy_bytes(to, from, bytes);                                                  \
    }                                                                                             \
    extern "C" MOECOMM_EMU_HOOK void* prefix##memset(void* to, int value, size_t bytes)           \
        MOECOMM_EMU_NOTHROW                                                                       \
    {                                                                                             \
        return emu::fill_bytes(to, value, bytes);                                                 \
    }
#if defined(__GLIBC__)
#define MOECOMM_EMU_NOTHROW noexcept
#else
#define MOECOMM_EMU_NOTHROW
#endif
MOECOMM_EMU_COPIES()
#undef MOECOMM_EMU_NOTHROW
#define MOECOMM_EMU_NOTHROW
MOECOMM_EMU_COPIES(__tsan_)
#undef MOECOMM_EMU_NOTHROW
#undef MOECOMM_EMU_COPIES
extern "C" MOECOMM_EMU_HOOK void __tsan_init() {}
extern "C" MOECOMM_EMU_HOOK void __tsan_func_entry(void*) {}
extern "C" MOECOMM_EMU_HOOK void __tsan_func_exit(void*) {}
#undef MOECOMM_EMU_HOOK

#endif
