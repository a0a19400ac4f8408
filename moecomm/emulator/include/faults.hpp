// Faults of a simulation: stores that arrive late and out of order, flags lost or sent twice.
#pragma once

#include "abi.hpp"

#include <cstring>
#include <vector>

namespace emu {

struct FaultOptions {
    u32 dead_rank = ~0u;        // stops being scheduled ...
    u32 delay_stores = 0;       // data stores to other ranks are held back
    u64 dead_after_steps = 0;   // ... after so many steps of its threads
    u64 drop_nth_release = 0;   // the n-th release of a flag (from 1) is lost
    u64 duplicate_release = 0;  // the n-th is done a second time, a flag later, a sum at once
};

// Data stores of one thread that have not reached memory. Each does at a random later moment, in
// random order; all have before the thread's next release or barrier.
class StoreBuffer {
public:
    bool empty() const { return items_.empty(); }
    size_t size() const { return items_.size(); }

    void push(void* to, const void* from, u32 bytes)
    {
        Item item;
        item.to = static_cast<char*>(to);
        item.bytes = bytes;
        std::memcpy(item.data, from, bytes);
        items_.push_back(item);
    }

    // Lets out what overlaps [p, p + bytes), in order.
    void let_out(const void* p, u32 bytes)
    {
        const char* begin = static_cast<const char*>(p);
        size_t kept = 0;
        for (size_t i = 0; i < items_.size(); ++i) {
            const Item item = items_[i];
            if (item.to < begin + bytes && begin < item.to + item.bytes)
                apply(item);
            else
                items_[kept++] = item;
        }
        items_.resize(kept);
    }

    void let_out_one(size_t i)
    {
        const Item item = items_[i];
        items_[i] = items_.back();
        items_.pop_back();
        apply(item);
    }

    void let_out_all()
    {
        for (const Item& item : items_) apply(item);
        items_.clear();
    }

    void clear() { items_.clear(); }

private:
    struct Item {
        char* to;
        u32 bytes;
        unsigned char data[16];
    };
    static void apply(const Item& item) { std::memcpy(item.to, item.data, item.bytes); }

    std::vector<Item> items_;
};

}  // namespace emu
