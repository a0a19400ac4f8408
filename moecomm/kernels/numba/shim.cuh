// What a kernel in Python can call: one C function for everything that only a machine can do.
//
// Every value is an i64: addresses, counts, truth values, and the bits of a float32. device.py says
// what each function means; both lists must agree (tests/test_numba_source.py). On a GPU these are
// inlined when a kernel is linked, and constants that Python passes are constants here. On a CPU
// they run in the emulator, which is told where in the Python source they were called.
#pragma once
#define HIDDEN 0u  // dtype.cuh has rows of this length; rows here have the length they are given
#include "common.cuh"
#include "dtype.cuh"

#define SHIM extern "C" __device__
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define CALLED_FROM_PYTHON
#else
#define CALLED_FROM_PYTHON emu::note_caller(__builtin_return_address(0))
#endif

template <class T>
DEVICE T* at(i64 address)
{
    return reinterpret_cast<T*>(address);
}

template <class T>
DEVICE T* shared_at(i64 offset)
{
    DYNAMIC_SHARED(u8, bytes);
    return reinterpret_cast<T*>(bytes + offset);
}

// ---- the numbers of the problem, by their place in device.py ------------------------------------
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
SHIM i64 moe_config(i64 place)
{
    switch (place) { CONFIG_CASES }  // `case 0: return 2; ...`; gone once kernels are linked
    return 0;
}
#else
SHIM i64 moe_config(i64 place) { return (i64)emu::config()[place]; }

// A function of Python has ended with an error: an assertion, mostly. (A GPU goes on.)
extern "C" void moe_raised(const char* what) { emu::self()->api->fail(emu::self(), what); }
#endif

// ---- who am I ---------------------------------------------------------------------------------
SHIM i64 moe_thread_id() { return threadIdx.x; }
SHIM i64 moe_warp_id() { return warp_id(); }
SHIM i64 moe_lane_id() { return lane_id(); }
SHIM i64 moe_block_id() { return blockIdx.x; }
SHIM i64 moe_num_blocks() { return gridDim.x; }

// ---- meeting others ---------------------------------------------------------------------------
SHIM i64 moe_sync_block() { CALLED_FROM_PYTHON; __syncthreads(); return 0; }
SHIM i64 moe_all_threads(i64 yes) { CALLED_FROM_PYTHON; return __syncthreads_and(yes != 0) != 0; }
SHIM i64 moe_any_thread(i64 yes) { CALLED_FROM_PYTHON; return __syncthreads_or(yes != 0) != 0; }
SHIM i64 moe_sync_warp() { CALLED_FROM_PYTHON; __syncwarp(); return 0; }
SHIM i64 moe_all_lanes(i64 yes) { CALLED_FROM_PYTHON; return __all_sync(FULL_WARP, yes != 0) != 0; }
SHIM i64 moe_any_lane(i64 yes) { CALLED_FROM_PYTHON; return __any_sync(FULL_WARP, yes != 0) != 0; }
SHIM i64 moe_ballot(i64 yes) { CALLED_FROM_PYTHON; return __ballot_sync(FULL_WARP, yes != 0); }
SHIM i64 moe_match(i64 key) { CALLED_FROM_PYTHON; return __match_any_sync(FULL_WARP, (u32)key); }
SHIM i64 moe_shuffle(i64 value, i64 lane)
{
    CALLED_FROM_PYTHON;
    return __shfl_sync(FULL_WARP, (i32)value, (i32)lane);
}
SHIM i64 moe_shuffle_up(i64 value, i64 distance)
{
    CALLED_FROM_PYTHON;
    return __shfl_up_sync(FULL_WARP, (i32)value, (u32)distance);
}
SHIM i64 moe_shuffle_xor(i64 value, i64 mask)
{
    CALLED_FROM_PYTHON;
    return __shfl_xor_sync(FULL_WARP, (i32)value, (i32)mask);
}
SHIM i64 moe_popcount(i64 bits) { return __popc((u32)bits); }
SHIM i64 moe_first_bit(i64 bits) { return __ffs((i32)(u32)bits) - 1; }

// ---- memory that others may touch -------------------------------------------------------------
SHIM i64 moe_load_u32(i64 p) { CALLED_FROM_PYTHON; return ld(at<u32>(p)); }
SHIM i64 moe_load_i32(i64 p) { CALLED_FROM_PYTHON; return ld(at<i32>(p)); }
SHIM i64 moe_load_i64(i64 p) { CALLED_FROM_PYTHON; return ld(at<i64>(p)); }
SHIM i64 moe_store_i32(i64 p, i64 v) { CALLED_FROM_PYTHON; st(at<u32>(p), (u32)v); return 0; }
SHIM i64 moe_store_i64(i64 p, i64 v) { CALLED_FROM_PYTHON; st(at<i64>(p), v); return 0; }
SHIM i64 moe_load_acquire(i64 p) { CALLED_FROM_PYTHON; return (i64)ld_acquire_sys(at<u64>(p)); }
SHIM i64 moe_load_relaxed(i64 p) { CALLED_FROM_PYTHON; return (i64)ld_relaxed_sys(at<u64>(p)); }
SHIM i64 moe_store_release(i64 p, i64 v)
{
    CALLED_FROM_PYTHON;
    st_release_sys(at<u64>(p), (u64)v);
    return 0;
}
SHIM i64 moe_store_relaxed(i64 p, i64 v)
{
    CALLED_FROM_PYTHON;
    st_relaxed_sys(at<u64>(p), (u64)v);
    return 0;
}
SHIM i64 moe_compare_and_swap(i64 p, i64 old, i64 v)
{
    CALLED_FROM_PYTHON;
    return (i64)cas_relaxed_sys(at<u64>(p), (u64)old, (u64)v);
}
SHIM i64 moe_atomic_add(i64 p, i64 v)
{
    CALLED_FROM_PYTHON;
    return (i64)atomicAdd(at<u64>(p), (u64)v);
}

// ---- the block's shared memory ----------------------------------------------------------------
SHIM i64 moe_shared_u32(i64 offset) { CALLED_FROM_PYTHON; return *shared_at<u32>(offset); }
SHIM i64 moe_shared_i32(i64 offset) { CALLED_FROM_PYTHON; return *shared_at<i32>(offset); }
SHIM i64 moe_shared_i64(i64 offset) { CALLED_FROM_PYTHON; return *shared_at<i64>(offset); }
SHIM i64 moe_put_shared_i32(i64 offset, i64 v)
{
    CALLED_FROM_PYTHON;
    *shared_at<u32>(offset) = (u32)v;
    return 0;
}
SHIM i64 moe_put_shared_i64(i64 offset, i64 v)
{
    CALLED_FROM_PYTHON;
    *shared_at<i64>(offset) = v;
    return 0;
}
SHIM i64 moe_add_shared(i64 offset, i64 v)
{
    CALLED_FROM_PYTHON;
    return atomicAdd(shared_at<u32>(offset), (u32)v);
}
SHIM i64 moe_min_shared(i64 offset, i64 v)
{
    CALLED_FROM_PYTHON;
    return atomicMin(shared_at<u32>(offset), (u32)v);
}

// ---- time, waiting, launches ------------------------------------------------------------------
SHIM i64 moe_time_ns() { CALLED_FROM_PYTHON; return (i64)global_timer_ns(); }
SHIM i64 moe_pause(i64 spins) { CALLED_FROM_PYTHON; return poll_pause((u32)spins); }
SHIM i64 moe_wait_for_earlier_kernels() { wait_for_earlier_kernels(); return 0; }
SHIM i64 moe_let_next_kernel_start() { let_next_kernel_start(); return 0; }
SHIM i64 moe_note_epoch(i64 epoch) { note_epoch((u64)epoch); return 0; }
SHIM i64 moe_note_wait(i64 flag, i64 v) { note_wait(at<u64>(flag), (u64)v); return 0; }

SHIM i64 moe_quotient(i64 a, i64 b) { return (u32)a / (u32)b; }
SHIM i64 moe_add_floats(i64 a, i64 b)
{
    return __float_as_uint(__fadd_rn(__uint_as_float((u32)a), __uint_as_float((u32)b)));
}

// ---- rows: all threads of the block take part -------------------------------------------------
DEVICE u32 item_bytes(i64 dtype) { return dtype == DTYPE_F32 ? 4 : dtype == DTYPE_F8E4M3 ? 1 : 2; }

// Chunk c (16 bytes) of a row; zeros past its end. In one load where the row is aligned.
template <class E>
DEVICE Chunk load_items(i64 row, u32 c, u32 bytes)
{
    Chunk chunk = zero_chunk();
    for (u32 i = 0; i < 16 / sizeof(E); ++i)
        if (c * 16 + (i + 1) * sizeof(E) <= bytes)
            set<E>(chunk, i, ld(at<E>(row + c * 16) + i));
    return chunk;
}

template <class E>
DEVICE void store_items(i64 row, u32 c, u32 bytes, const Chunk& chunk)
{
    for (u32 i = 0; i < 16 / sizeof(E); ++i)
        if (c * 16 + (i + 1) * sizeof(E) <= bytes)
            st(at<E>(row + c * 16) + i, get<E>(chunk, i));
}

DEVICE Chunk load_chunk(i64 row, u32 c, u32 bytes, u32 item, bool aligned)
{
    if (aligned && c * 16 + 16 <= bytes) return to_chunk(ld_v4(at<u8>(row + c * 16)));
    if (item == 4) return load_items<u32>(row, c, bytes);
    if (item == 2) return load_items<u16>(row, c, bytes);
    return load_items<u8>(row, c, bytes);
}

DEVICE void store_chunk(i64 row, u32 c, u32 bytes, u32 item, bool aligned, const Chunk& chunk)
{
    if (aligned && c * 16 + 16 <= bytes)
        st_v4(at<u8>(row + c * 16), to_v4(chunk));
    else if (item == 4)
        store_items<u32>(row, c, bytes, chunk);
    else if (item == 2)
        store_items<u16>(row, c, bytes, chunk);
    else
        store_items<u8>(row, c, bytes, chunk);
}

SHIM i64 moe_copy_row(i64 to, i64 to_aligned, i64 from, i64 from_aligned, i64 columns, i64 dtype)
{
    CALLED_FROM_PYTHON;
    const u32 item = item_bytes(dtype), bytes = (u32)columns * item, chunks = (bytes + 15) / 16;
    for (u32 c = threadIdx.x; c < chunks; c += CHUNKS_AT_ONCE * blockDim.x) {
        Chunk held[CHUNKS_AT_ONCE];
        UNROLL for (u32 n = 0; n < CHUNKS_AT_ONCE; ++n)
            if (c + n * blockDim.x < chunks)
                held[n] = load_chunk(from, c + n * blockDim.x, bytes, item, from_aligned != 0);
        UNROLL for (u32 n = 0; n < CHUNKS_AT_ONCE; ++n)
            if (c + n * blockDim.x < chunks)
                store_chunk(to, c + n * blockDim.x, bytes, item, to_aligned != 0, held[n]);
    }
    return 0;
}

// `to`: shared memory has `num` addresses of rows there, to each of which `offset` is added.
SHIM i64 moe_spread_row(i64 to, i64 num, i64 offset, i64 to_aligned, i64 from, i64 from_aligned,
                        i64 columns, i64 dtype)
{
    CALLED_FROM_PYTHON;
    const u32 item = item_bytes(dtype), bytes = (u32)columns * item, chunks = (bytes + 15) / 16;
    for (u32 c = threadIdx.x; c < chunks; c += CHUNKS_AT_ONCE * blockDim.x) {
        Chunk held[CHUNKS_AT_ONCE];
        UNROLL for (u32 n = 0; n < CHUNKS_AT_ONCE; ++n)
            if (c + n * blockDim.x < chunks)
                held[n] = load_chunk(from, c + n * blockDim.x, bytes, item, from_aligned != 0);
        UNROLL for (u32 n = 0; n < CHUNKS_AT_ONCE; ++n)
            if (c + n * blockDim.x < chunks)
                for (u32 i = 0; i < (u32)num; ++i)
                    store_chunk(shared_at<i64>(to)[i] + offset, c + n * blockDim.x, bytes, item,
                                to_aligned != 0, held[n]);
    }
    return 0;
}

SHIM i64 moe_clear_row(i64 row, i64 aligned, i64 columns, i64 dtype)
{
    CALLED_FROM_PYTHON;
    const u32 item = item_bytes(dtype), bytes = (u32)columns * item;
    for (u32 c = threadIdx.x; c < (bytes + 15) / 16; c += blockDim.x)
        store_chunk(row, c, bytes, item, aligned != 0, zero_chunk());
    return 0;
}

struct Scale {
    float value;
    float inverse;
};

DEVICE Scale scale_of(float largest, bool pow2)
{
    Scale s;
    largest = fmaxf(largest, 1e-30f);  // an all-zero block gets a finite scale
    s.value = __fdiv_rn(largest, 448.0f);
    s.inverse = __fdiv_rn(448.0f, largest);
    if (pow2) {
        const u32 bits = (__float_as_uint(s.value) + 0x7fffffu) & 0xff800000u;  // rounded up
        s.value = __uint_as_float(bits);
        // Exponent negated; of an infinite scale 0, not -infinity.
        s.inverse = __uint_as_float((u32)max((i32)(0x7f000000u - bits), 0));
    }
    return s;
}

// Columns [16 c, 16 c + 16) of a row as floats; zeros past its end.
template <int D>
DEVICE void load_floats(i64 row, u32 c, u32 columns, bool aligned, float values[16])
{
    typedef typename Bits<D>::type Elem;
    const u32 item = sizeof(Elem), each = 16 / item;
    UNROLL for (u32 i = 0; i < item; ++i) {
        const Chunk chunk = load_chunk(row, c * item + i, columns * item, item, aligned);
        UNROLL for (u32 j = 0; j < each; ++j) values[i * each + j] = decode<D>(get<Elem>(chunk, j));
    }
}

template <int D>
DEVICE void cast_row(i64 to, u32 num, i64 row_offset, i64 scale_offset, i64 from, bool aligned,
                     u32 columns, u32 block, bool pow2)
{
    const u32 chunks = (columns + 15) / 16;
    for (u32 base = warp_id() * WARP_SIZE; base < chunks; base += blockDim.x) {
        const u32 c = base + lane_id();
        float values[16];
        load_floats<D>(from, c, columns, aligned, values);
        Scale s = {1.0f, 1.0f};
        if (block) {  // the block / 16 lanes of a block agree on its largest value
            float largest = 0.0f;
            UNROLL for (u32 i = 0; i < 16; ++i) largest = fmaxf(largest, fabsf(values[i]));
            for (u32 step = 1; step < block / 16; step *= 2)
                largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, step));
            s = scale_of(largest, pow2);
        }
        if (c >= chunks) continue;
        Chunk out = zero_chunk();
        UNROLL for (u32 i = 0; i < 16; ++i)
            set<u8>(out, i, float_to_e4m3(__fmul_rn(values[i], s.inverse)));
        for (u32 i = 0; i < num; ++i) {
            const i64 record = shared_at<i64>(to)[i];
            store_chunk(record + row_offset, c, columns, 1, true, out);
            if (block && c * 16 % block == 0)
                st(at<float>(record + scale_offset) + c * 16 / block, s.value);
        }
    }
}

SHIM i64 moe_cast_row(i64 to, i64 num, i64 row_offset, i64 scale_offset, i64 from, i64 aligned,
                      i64 dtype, i64 columns, i64 block, i64 pow2)
{
    CALLED_FROM_PYTHON;
    const u32 n = (u32)num, width = (u32)columns, b = (u32)block;
    if (dtype == DTYPE_BF16)
        cast_row<DTYPE_BF16>(to, n, row_offset, scale_offset, from, aligned, width, b, pow2);
    else if (dtype == DTYPE_F16)
        cast_row<DTYPE_F16>(to, n, row_offset, scale_offset, from, aligned, width, b, pow2);
    else
        cast_row<DTYPE_F32>(to, n, row_offset, scale_offset, from, aligned, width, b, pow2);
    return 0;
}

#define ROWS_AT_ONCE 4u  // independent loads under way in one thread

// One chunk of a sum, element by element: in fp32, products and sums rounded one by one.
template <int D>
struct Total {
    typedef typename Bits<D>::type Elem;
    static constexpr u32 kElems = 16 / sizeof(Elem);
    float values[kElems];

    DEVICE void begin(const Chunk& c)
    {
        UNROLL for (u32 e = 0; e < kElems; ++e) values[e] = decode<D>(get<Elem>(c, e));
    }

    DEVICE void add(float weight, const Chunk& c)
    {
        UNROLL for (u32 e = 0; e < kElems; ++e)
            values[e] = __fadd_rn(values[e], __fmul_rn(weight, decode<D>(get<Elem>(c, e))));
    }

    DEVICE Chunk rounded() const
    {
        Chunk c = zero_chunk();
        UNROLL for (u32 e = 0; e < kElems; ++e) set<Elem>(c, e, encode<D>(values[e]));
        return c;
    }
};

template <int D>
DEVICE void sum_rows(i64 to, bool to_aligned, i64 rows, i64 weights, u32 num, bool from_aligned,
                     u32 columns, bool accumulate)
{
    typedef typename Bits<D>::type Elem;
    const u32 item = sizeof(Elem), bytes = columns * item;
    for (u32 c = threadIdx.x; c < (bytes + 15) / 16; c += blockDim.x) {
        Total<D> sum;
        sum.begin(accumulate ? load_chunk(to, c, bytes, item, to_aligned) : zero_chunk());
        for (u32 first = 0; first < num; first += ROWS_AT_ONCE) {
            Chunk y[ROWS_AT_ONCE];
            UNROLL for (u32 i = 0; i < ROWS_AT_ONCE; ++i)
                if (first + i < num)
                    y[i] = load_chunk(shared_at<i64>(rows)[first + i], c, bytes, item, from_aligned);
            UNROLL for (u32 i = 0; i < ROWS_AT_ONCE; ++i)
                if (first + i < num)
                    sum.add(__uint_as_float(shared_at<u32>(weights)[first + i]), y[i]);
        }
        store_chunk(to, c, bytes, item, to_aligned, sum.rounded());
    }
}

SHIM i64 moe_sum_rows(i64 to, i64 to_aligned, i64 rows, i64 weights, i64 num, i64 from_aligned,
                      i64 columns, i64 dtype, i64 accumulate)
{
    CALLED_FROM_PYTHON;
    const u32 n = (u32)num, width = (u32)columns;
    if (dtype == DTYPE_BF16)
        sum_rows<DTYPE_BF16>(to, to_aligned, rows, weights, n, from_aligned, width, accumulate);
    else if (dtype == DTYPE_F16)
        sum_rows<DTYPE_F16>(to, to_aligned, rows, weights, n, from_aligned, width, accumulate);
    else
        sum_rows<DTYPE_F32>(to, to_aligned, rows, weights, n, from_aligned, width, accumulate);
    return 0;
}
