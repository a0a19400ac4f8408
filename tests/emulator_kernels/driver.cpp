// A program and the runtime in one executable, for machines that the tests run on in emulation:
// checks the context switch and the stacks. Prints "passed".
#include "primitives.cu"

#include "runtime.cpp"

#include <cmath>
#include <cstdio>
#include <vector>

static void run_kernel(const void* args);
static void (*chosen)(Args);
static void run_kernel(const void* args) { emu::call(chosen, args); }

static bool launch(World* world, void (*kernel)(Args), const Args& args, u32 grid, u32 block)
{
    chosen = kernel;
    const emu::Kernel entry = {"kernel", run_kernel, sizeof(Args)};
    const u64 config[2] = {40, 2};
    const u32 grid3[3] = {grid, 1, 1}, block3[3] = {block, 1, 1};
    if (!emu_launch(world, 0, &entry, &args, config, 2, grid3, block3, 4 * block)) return false;
    for (;;) {
        const emu::Event event = static_cast<emu::Event>(emu_step(world, 50000000, 0));
        if (event == emu::Event::finished) break;
        if (event != emu::Event::budget) {
            std::printf("%s\n", emu_failure_text(world));
            emu_abandon(world);
            return false;
        }
    }
    emu_finished(world);
    return true;
}

// Keeps values in callee-saved floating-point registers over switches.
extern "C" __global__ void registers(Args a)
{
    double kept[8];
    for (u32 i = 0; i < 8; ++i) kept[i] = a.param + threadIdx.x * 0.5 + i;
    double x = 0;
    for (u32 turn = 0; turn < 50; ++turn) {
        for (u32 i = 0; i < 8; ++i) kept[i] += i;
        __syncthreads();
        for (u32 i = 0; i < 8; ++i) x += kept[i];
        __syncwarp();
    }
    a.words[threadIdx.x] = (u64)x;
}

static int failures = 0;
static void expect(bool holds, const char* what)
{
    if (holds) return;
    std::printf("failed: %s\n", what);
    ++failures;
}

static void run_all(u64 seed)
{
    emu::Options options;
    options.simulation = seed != 0;
    options.seed = seed;
    World* world = emu_create(&options);
    std::vector<u32> in(4096), out(4096);
    std::vector<u64> words(4096);
    for (u32 i = 0; i < in.size(); ++i) in[i] = i * 37 % 101;
    Args args = {in.data(), out.data(), words.data(), 0xffffffffu, 3, 32, 0};
    for (u32 turn = 0; turn < 3; ++turn) {
        expect(launch(world, shuffle_xor, args, 2, 64), "shuffle_xor ends");
        for (u32 i = 0; i < 128; ++i) expect(out[i] == in[i ^ 3], "shuffle_xor");
        args.exiting = 96;
        expect(launch(world, barriers, args, 2, 96), "barriers end");
        for (u32 i = 0; i < 96; ++i) expect(out[i] >> 8 == in[(i + 5) % 96] + 5, "barriers");
        args.exiting = 0;
        expect(launch(world, half_warps, args, 1, 64), "half_warps end");
        expect(launch(world, registers, args, 3, 256), "registers end");
        for (u32 t = 0; t < 256; ++t) {
            double x = 0;
            for (u32 n = 1; n <= 50; ++n)
                for (u32 i = 0; i < 8; ++i) x += 3 + t * 0.5 + i + n * i;
            expect(words[t] == (u64)x, "registers");
        }
        args.param = 40;
        expect(launch(world, deep_stack, args, 1, 64), "deep_stack ends");
        args.param = 3;
        expect(!launch(world, divergent_barrier, args, 1, 64), "divergence is found");
    }
    emu_destroy(world);
}

int main()
{
    for (u64 seed = 0; seed < 4; ++seed) run_all(seed);
    std::printf(failures ? "%d failed\n" : "passed\n", failures);
    return failures != 0;
}
