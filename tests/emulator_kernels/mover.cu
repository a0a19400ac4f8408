// The mover of one rank's bytes to its remote peers, as a kernel: what docs/protocol.md asks of a
// host thread, under the emulator's schedules and checks. A block serves a peer, a thread a slot.
// Writes of one epoch go out in an order that differs from epoch to epoch.
#include "emulator.hpp"

#define NUM_RANKS (emu::config()[0])
#define SLOTS (emu::config()[1])
#define PRIVATE (emu::config()[2])
#define DOOR_WORDS (emu::config()[3])
#define PLAN_WORDS (emu::config()[4])
#define CHANNELS (emu::config()[5])
#define HEAD_BYTES (emu::config()[6])
#define RECORD_BYTES (emu::config()[7])
#define ROW_BYTES (emu::config()[8])
#define STAGED_RECORDS (emu::config()[9])
#define SOURCE_RECORDS (emu::config()[10])
#define STAGED_ROWS (emu::config()[11])
#define LANDING_ROWS (emu::config()[12])
#define FLAGS(n) (emu::config()[13 + n])  // offsets: abort_out, abort_in, door, plan, arrived
#define BULK(n) (emu::config()[18 + n])   // out_head, in_head, out_record, in_record, out_row, in_row

enum { HEAD, PRIVATE_RECORDS, RECORDS, ROWS, ACK, DOORS };
enum { CHANNEL_HEAD, CHANNEL_ACK, CHANNEL_PRIVATE, CHANNEL_RECORDS, CHANNEL_ROWS };

struct Args {
    u64 rank;       // whose mover
    u64 stop;       // u64[2]: not 0 when all is over; an epoch one of whose doors came too late
    u64 remote;     // bit r: rank r is remote
    u64 flags[16];  // of each rank
    u64 bulk[16];
    u64 bounce;  // whether the doors are rung by push
};

struct Post {
    const Args& a;
    u64 peer, slot, epoch;

    u64* mine(u32 region, u64 i) const { return (u64*)(a.flags[a.rank] + FLAGS(region)) + i; }
    u64* theirs(u32 region, u64 i) const { return (u64*)(a.flags[peer] + FLAGS(region)) + i; }
    u64 plan(u32 field) const { return ld(mine(3, (slot * NUM_RANKS + peer) * PLAN_WORDS + field)); }

    void arrive(u32 channel) const
    {
        st_release_sys(theirs(4, (slot * NUM_RANKS + a.rank) * CHANNELS + channel), epoch);
    }

    void copy(u32 out, u64 from, u32 in, u64 to, u64 bytes) const
    {
        note_epoch(epoch);
        for (u64 i = 0; i < bytes; i += 16)
            st_v4((void*)(a.bulk[peer] + BULK(in) + to + i),
                  ld_v4((const void*)(a.bulk[a.rank] + BULK(out) + from + i)));
    }

    // With the head a peer can answer; with its records. Then the next epoch may ring, so no door
    // of this one may be left that no peer's answer waits for.
    void all_that_matters_is_rung() const
    {
        u64 most = 0;
        for (u64 r = 0; r < NUM_RANKS; ++r)
            if (a.remote >> r & 1) most = max(most, ld(mine(3, (slot * NUM_RANKS + r) * PLAN_WORDS + 1)));
        for (u32 door = PRIVATE_RECORDS; door <= RECORDS; ++door)
            if (most <= (door == RECORDS ? PRIVATE : 0) &&
                ld_acquire_sys(mine(2, slot * DOOR_WORDS + door)) < epoch)
                st((u64*)a.stop + 1, epoch);
    }

    void head() const
    {
        const u64 pair = slot * NUM_RANKS;
        copy(0, (pair + peer) * HEAD_BYTES, 1, (pair + a.rank) * HEAD_BYTES, HEAD_BYTES);
        arrive(CHANNEL_HEAD);
    }

    void records(u64 first, u64 begin, u64 end, u32 channel) const
    {
        if (begin >= end) return;
        const u64 to = (slot * NUM_RANKS + a.rank) * SOURCE_RECORDS + begin;
        copy(2, (slot * STAGED_RECORDS + first + begin) * RECORD_BYTES, 3, to * RECORD_BYTES,
             (end - begin) * RECORD_BYTES);
        arrive(channel);
    }

    void rows() const
    {
        copy(4, (slot * STAGED_ROWS + plan(2)) * ROW_BYTES, 5,
             (slot * LANDING_ROWS + plan(4)) * ROW_BYTES, plan(3) * ROW_BYTES);
        arrive(CHANNEL_ROWS);
        arrive(CHANNEL_ACK);
    }
};

// Somebody gave up: the peer shall know, once. True: all is over.
static bool over(const Post& post, bool* told)
{
    const u64 word = *told ? 0 : ld_acquire_sys(post.mine(0, 0));
    if (word) {
        st_release_sys(post.theirs(1, 0), word);
        *told = true;
    }
    return ld_acquire_sys((const u64*)post.a.stop) != 0;
}

// Waits for one of two doors. False: all is over.
static bool rung(const Post& post, u32 door, u32 other, u32* which, bool* told)
{
    const u64 base = post.slot * DOOR_WORDS;
    for (u32 spins = 0;; ++spins) {
        *which = ld_acquire_sys(post.mine(2, base + other)) >= post.epoch ? other : door;
        if (ld_acquire_sys(post.mine(2, base + *which)) >= post.epoch) return true;
        if (over(post, told)) return false;
        poll_pause(spins);
    }
}

extern "C" __global__ void mover(Args a)
{
    const u64 slot = threadIdx.x;
    if (slot >= SLOTS || !(a.remote >> blockIdx.x & 1)) return;
    bool told = false;
    for (u64 epoch = 1;; ++epoch) {
        Post post = {a, blockIdx.x, slot, epoch};
        u32 which;
        if (!rung(post, HEAD, HEAD, &which, &told)) return;
        const u64 first = post.plan(0), n = post.plan(1);
        if (a.bounce) post.all_that_matters_is_rung();
        const u64 some = n < PRIVATE ? n : PRIVATE;
        const bool late = (epoch + a.rank + blockIdx.x) % 2;  // the head comes last
        if (!late) post.head();
        if (!rung(post, PRIVATE_RECORDS, PRIVATE_RECORDS, &which, &told)) return;
        if (!late) post.records(first, 0, some, CHANNEL_PRIVATE);
        if (!rung(post, RECORDS, RECORDS, &which, &told)) return;
        post.records(first, some, n, CHANNEL_RECORDS);
        if (late) post.records(first, 0, some, CHANNEL_PRIVATE);
        if (late) post.head();
        if (!rung(post, ROWS, ACK, &which, &told)) return;
        if (which == ROWS)
            post.rows();
        else
            post.arrive(CHANNEL_ACK);
    }
}
