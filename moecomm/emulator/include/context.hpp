// Switching between stacks: assembly for x86-64 and aarch64, ucontext elsewhere.
//
// A switch saves what the C ABI says a call preserves. Floating-point control words are not saved:
// device code cannot change them. `swapcontext` would do a system call for the signal mask each
// time, 20 times the cost.
#pragma once

#include <cstddef>
#include <cstdint>

// MOECOMM_EMULATOR_UCONTEXT: use the fallback anyway, to test it.
#if (defined(__x86_64__) || defined(__aarch64__)) && !defined(MOECOMM_EMULATOR_UCONTEXT)
#define MOECOMM_EMU_ASSEMBLY 1
#else
#define MOECOMM_EMU_ASSEMBLY 0
#include <ucontext.h>
#endif

namespace emu {

typedef void (*StackMain)();

#if MOECOMM_EMU_ASSEMBLY

#if defined(__APPLE__)
#define MOECOMM_EMU_SYMBOL(name) "_" #name
#define MOECOMM_EMU_HIDDEN ".private_extern "
#else
#define MOECOMM_EMU_SYMBOL(name) #name
#define MOECOMM_EMU_HIDDEN ".hidden "
#endif

extern "C" {
// Saves the running context to *save and continues the one saved at `to`.
void moecomm_emu_switch(void** save, void* to);
// Saves the running context to *save and calls `main` on a fresh stack ending at `top`.
void moecomm_emu_enter(void** save, void* top, StackMain main);
}

#if defined(__x86_64__)
asm(".text\n.p2align 4\n"
    ".globl " MOECOMM_EMU_SYMBOL(moecomm_emu_switch) "\n"
    MOECOMM_EMU_HIDDEN MOECOMM_EMU_SYMBOL(moecomm_emu_switch) "\n"
    MOECOMM_EMU_SYMBOL(moecomm_emu_switch) ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n"
    ".p2align 4\n"
    ".globl " MOECOMM_EMU_SYMBOL(moecomm_emu_enter) "\n"
    MOECOMM_EMU_HIDDEN MOECOMM_EMU_SYMBOL(moecomm_emu_enter) "\n"
    MOECOMM_EMU_SYMBOL(moecomm_emu_enter) ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  xorl %ebp, %ebp\n"
    "  pushq $0\n  pushq $0\n"  // a return address of 0 ends backtraces; keeps 16-byte alignment
    "  callq *%rdx\n"
    "  ud2\n");
#else
asm(".text\n.p2align 4\n"
    ".globl " MOECOMM_EMU_SYMBOL(moecomm_emu_switch) "\n"
    MOECOMM_EMU_HIDDEN MOECOMM_EMU_SYMBOL(moecomm_emu_switch) "\n"
    MOECOMM_EMU_SYMBOL(moecomm_emu_switch) ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n"
    "  mov sp, x1\n"
    "  ldp x19, x20, [sp]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n"
    "  ret\n"
    ".p2align 4\n"
    ".globl " MOECOMM_EMU_SYMBOL(moecomm_emu_enter) "\n"
    MOECOMM_EMU_HIDDEN MOECOMM_EMU_SYMBOL(moecomm_emu_enter) "\n"
    MOECOMM_EMU_SYMBOL(moecomm_emu_enter) ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n"
    "  mov sp, x1\n"
    "  mov x29, xzr\n  mov x30, xzr\n"
    "  blr x2\n"
    "  brk #1\n");
#endif

struct Context {
    void* sp = nullptr;
};

inline void switch_context(Context& from, Context& to) { moecomm_emu_switch(&from.sp, to.sp); }

inline void enter_stack(Context& from, Context&, void* /*low*/, void* top, StackMain main)
{
    moecomm_emu_enter(&from.sp, top, main);
}

// Whether a finished thread may hand its own stack to the next one without leaving it first.
constexpr bool kReenterStack = true;

#else

struct Context {
    ucontext_t uc;
};

inline void switch_context(Context& from, Context& to) { swapcontext(&from.uc, &to.uc); }

inline void enter_stack(Context& from, Context& fresh, void* low, void* top, StackMain main)
{
    getcontext(&fresh.uc);
    fresh.uc.uc_stack.ss_sp = low;
    fresh.uc.uc_stack.ss_size =
        static_cast<size_t>(static_cast<char*>(top) - static_cast<char*>(low));
    fresh.uc.uc_link = nullptr;
    makecontext(&fresh.uc, main, 0);
    swapcontext(&from.uc, &fresh.uc);
}

constexpr bool kReenterStack = false;  // makecontext writes to the top of the stack

#endif

}  // namespace emu
