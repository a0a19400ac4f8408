// dispatch_send, with flags in the data: for small batches, where waiting costs more than bytes.
//
// As dispatch_send.cu, but a block first makes the token's image (meta | row | scales) in shared
// memory, once, and then its warps write it to each destination as lines.
//
// Writes: peers' head, record; own route, num_dest, weight, num_tokens, epoch.
// Order: none but the lines' own.
#include "line.cuh"
#include "routing.cuh"
#include "wire_row.cuh"

// Shared memory: the part of the image that all destinations share, and each one's meta.
struct Image {
    u8* body;   // [RECORD_WORDS * 8 - META_BYTES]
    u32* meta;  // [num_dest][META_BYTES / 4]

    DEVICE void row_chunk(u64 c, Chunk chunk) const
    {
        *reinterpret_cast<uint4*>(body + c * 16) = to_v4(chunk);
    }

    DEVICE void row_scale(u64 block, float scale) const
    {
        reinterpret_cast<float*>(body + RECORD_SCALE_OFF - META_BYTES)[block] = scale;
    }

    // Between the last scale and the end of the image: sent, but never written again.
    DEVICE void clear_rest() const
    {
        const u64 end = (RECORD_WORDS * 8 - RECORD_SCALE_OFF) / 4;
        for (u64 b = NUM_SCALES + threadIdx.x; b < end; b += blockDim.x) row_scale(b, 0.0f);
    }

    DEVICE u64 word(u32 d, u32 i) const
    {
        if (i < META_BYTES / 8) return reinterpret_cast<const u64*>(meta)[d * (META_BYTES / 8) + i];
        return i < RECORD_WORDS ? reinterpret_cast<const u64*>(body)[i - META_BYTES / 8] : 0;
    }
};

// Warp 0: where token t goes, and what each destination is told.
DEVICE void plan_image(const Args& a, const Counters& s, u32 t, Slot slot, const Image& image)
{
    plan_token(a, s, t, slot, *s.plans);
    __syncwarp();
    const u32 words = META_BYTES / 4;
    for (u32 i = lane_id(); i < s.plans->num_dest * words; i += WARP_SIZE)
        image.meta[i] = meta_word(a, *s.plans, t, i / words, i % words);
}

DEVICE void send_image(const Plan& plan, const Image& image, u64 epoch)
{
    const u32 pieces = num_pieces(RECORD_WORDS);
    for (u32 task = warp_id(); task < plan.num_dest * pieces; task += num_warps()) {
        const u32 d = task / pieces, piece = task % pieces;
        const u32 word = piece * WARP_WORDS + lane_id() / 8 * LINE_WORDS + lane_id() % 8 * 2;
        Pair v;
        v.low = image.word(d, word);
        v.high = holds_flag() ? epoch : image.word(d, word + 1);
        st_line(lane_address(plan.record[d], piece), v, lane_live(piece, RECORD_WORDS));
    }
}

DEVICE void send_tokens(const Args& a, const Counters& s, Share share, Image image, u64 epoch)
{
    const u32 replica = (u32)(a.rank % REPLICAS);
    image.clear_rest();
    count_tokens(a, s, 0, share.first);
    for (u32 t = share.first; t < share.last; ++t) {
        const bool ours = t % REPLICAS == replica;
        // Neither needs what is counted: these loads overlap the counting.
        Slot slot;
        if (warp_id() == 0) slot = load_slot(a, t);
        if (ours) make_row(a, t, image);
        __syncthreads();  // what comes before t is counted
        if (warp_id() == 0) plan_image(a, s, t, slot, image);
        __syncthreads();  // every thread's part of the image comes before it is sent
        if (ours) send_image(*s.plans, image, epoch);
        __syncthreads();  // nobody still reads plan and image
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) dispatch_send_lines(Args a)
{
    DYNAMIC_SHARED(u32, words);
    const Counters s = counters_at(words);
    u64 epoch;
    if (!begin_send(a, s, &epoch)) return;
    Image image;
    image.body = reinterpret_cast<u8*>(words) + (counters_bytes() + 15) / 16 * 16;
    image.meta = reinterpret_cast<u32*>(image.body + RECORD_WORDS * 8 - META_BYTES);
    const u32 tokens = token_count(a);
    if (blockIdx.x == 0) announce(a, s, tokens, epoch);
    if (blockIdx.x > 0 || gridDim.x == 1) send_tokens(a, s, token_share(tokens), image, epoch);
}
