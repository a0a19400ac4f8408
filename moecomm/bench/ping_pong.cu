// Two GPUs raise each other's flag in turn: what a signal costs, without any data.
//
// One thread each. The first writes i to its peer's flag and waits for i in its own; the other
// waits and answers. `report` is memory that the host reads: nanoseconds of all rounds but the
// first, in which the later kernel starts; then the number of rounds, fewer than asked for when the
// peer did not answer within `timeout_ns`.
typedef unsigned long long u64;

struct PingPong {
    u64 own;   // address of this GPU's flag; 0 at the start
    u64 peer;  // address of the other's
    u64 rounds;
    u64 is_first;
    u64 timeout_ns;
    u64 report;
};

static __device__ u64 now()
{
    u64 ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

static __device__ void raise(u64 flag, u64 value)
{
    asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(flag), "l"(value) : "memory");
}

static __device__ bool wait(u64 flag, u64 value, u64 deadline)
{
    for (u64 spins = 1;; ++spins) {
        u64 seen;
        asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(flag) : "memory");
        if (seen >= value) return true;
        if (spins % 1024 == 0 && now() > deadline) return false;
    }
}

extern "C" __global__ void ping_pong(PingPong p)
{
    if (p.rounds == 0) return;
    const u64 deadline = now() + p.timeout_ns;
    u64 start = 0, done = 0;
    for (u64 i = 1; i <= p.rounds; ++i, ++done) {
        if (p.is_first) raise(p.peer, i);
        if (!wait(p.own, i, deadline)) break;
        if (!p.is_first) raise(p.peer, i);
        if (i == 1) start = now();
    }
    u64* const report = reinterpret_cast<u64*>(p.report);
    report[0] = now() - start;
    report[1] = done;
}
