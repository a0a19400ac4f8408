// combine_recv: out[t] = sum over places of (weight *) returned row, in fp32, rounded once.
//
// Teams share out this rank's tokens; each waits for exactly the rows its token is owed, which
// the routing kept by dispatch_send tells. Places count slots k (reduce="receiver": weighted
// here) or destination ranks in ascending order (already weighted).
//
// Reads: own combine_row, combine_flag, route, num_dest, weight.  Writes: out.
// Order: acquire of a row's flag, the team's barrier, its bytes.
#include "owed.cuh"
#include "team.cuh"

// One warp. A barrier must follow: each row was acquired by one lane.
DEVICE bool rows_arrived(const Args& a, const Owed& owed, u32 t, u64 epoch)
{
    const u32 n = min(lane_id(), owed.num ? owed.num - 1 : 0);
    u32 missing = __ballot_sync(FULL_WARP, lane_id() < owed.num);
    if (REMOTE) {
        const bool ok = lane_id() >= owed.num || owed_arrived(a, owed, t, n, epoch);
        return __all_sync(FULL_WARP, ok);
    }
    const u64* flag = combine_flag(a.symmetric, a, t, owed.num ? owed.place[n] : 0);
    const Awaited who = from_rank(PHASE_COMBINE_RECV, owed.num ? owed.peer[n] : 0);
    while (missing) {
        const u32 come = wait_any(a, flag, missing >> lane_id() & 1, epoch, who);
        if (!come) return false;
        missing &= ~come;
    }
    return true;
}

// Independent loads under way in one thread: ROWS_AT_ONCE rows of COLUMNS_AT_ONCE chunks. More than
// one column only where all rows come at once, or the sums would need too many registers.
#define LOADS_AT_ONCE 8u
#define ROWS_AT_ONCE (PLACES < 4 ? (u32)PLACES : 4u)
#define COLUMNS_AT_ONCE (PLACES < 4 ? LOADS_AT_ONCE / ROWS_AT_ONCE : 1u)

typedef Row<COMBINE_DTYPE> Y;

// Chunk c of rows first, first + 1 ... of those owed to token t.
DEVICE void load_rows(const Args& a, const Owed& owed, u32 t, u32 first, u64 c, Chunk* y)
{
    UNROLL for (u32 i = 0; i < ROWS_AT_ONCE; ++i)
        if (first + i < owed.num && c < Y::num_chunks())
            y[i] = to_chunk(ld_v4((const void*)(owed_row(a, owed, t, first + i) + c * 16)));
}

DEVICE void add_rows(const Owed& owed, u32 first, const Chunk* y, Sum<COMBINE_DTYPE>& sum)
{
    UNROLL for (u32 i = 0; i < ROWS_AT_ONCE; ++i)
        if (first + i < owed.num) sum.add(owed.weight[first + i], y[i]);
}

// Chunks c, c + step ... of token t.
DEVICE void sum_chunks(const Args& a, const Owed& owed, u32 t, u64 c, u32 step)
{
    void* out = (void*)(a.out + t * a.out_stride);
    Chunk y[LOADS_AT_ONCE];
    UNROLL for (u32 n = 0; n < COLUMNS_AT_ONCE; ++n)
        load_rows(a, owed, t, 0, c + n * step, y + n * ROWS_AT_ONCE);
    UNROLL for (u32 n = 0; n < COLUMNS_AT_ONCE; ++n) {
        const u64 column = c + n * step;
        if (column >= Y::num_chunks()) continue;
        Sum<COMBINE_DTYPE> sum = Sum<COMBINE_DTYPE>::zero();
        if (a.accumulate) sum = Sum<COMBINE_DTYPE>::of(Y::load(out, column, a.out_aligned));
        add_rows(owed, 0, y + n * ROWS_AT_ONCE, sum);
        for (u32 first = ROWS_AT_ONCE; PLACES > ROWS_AT_ONCE && first < owed.num;
             first += ROWS_AT_ONCE) {
            load_rows(a, owed, t, first, column, y);
            add_rows(owed, first, y, sum);
        }
        Y::store(out, column, sum.rounded(), a.out_aligned);
    }
}

DEVICE void sum_rows(const Args& a, const Owed& owed, u32 t)
{
    const u32 step = team_threads();
    for (u64 c = team_thread(); c < Y::num_chunks(); c += COLUMNS_AT_ONCE * step)
        sum_chunks(a, owed, t, c, step);
}

DEVICE void receive_tokens(const Args& a, u32 tokens, u64 epoch)
{
    DYNAMIC_SHARED(Owed, spaces);
    Owed& owed = spaces[team_id()];
    for (u32 t = blockIdx.x * num_teams() + team_id(); t < tokens; t += gridDim.x * num_teams()) {
        bool ok = true;
        if (leads_team()) {
            load_owed(a, owed, t);
            __syncwarp();
            ok = rows_arrived(a, owed, t, epoch);
        }
        if (!team_all(ok)) return;
        sum_rows(a, owed, t);
        team_sync();  // nobody still reads this team's space
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) combine_recv(Args a)
{
    let_next_kernel_start();
    const u32 tokens = ld(local_at<u32>(a, LOC_NUM_TOKENS, a.slot));
    u64 epoch;
    if (team_all(begin_combine(a, &epoch))) receive_tokens(a, tokens, epoch);
    wait_for_earlier_kernels();  // whoever waits for this kernel also waits for combine_send
}
