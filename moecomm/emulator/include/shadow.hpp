// Who last wrote and read each four bytes of memory that the checks watch.
//
// Pages of cells are made when their memory is first touched, so a range of many GiB costs nothing
// by itself. What the host wrote before a page was made is kept as a list of intervals. Granules
// that are accessed in part (rows of odd length) get a cell for each byte.
#pragma once

#include "clocks.hpp"

#include <array>
#include <cstdint>
#include <iterator>
#include <memory>
#include <unordered_map>
#include <vector>

namespace emu {

struct Access {
    u32 slot = kNobody;
    u32 time = 0;
    u32 epoch = 0;  // low half of what the thread noted; 0: none
    u32 place = 0;  // low half of the address of the code
};

constexpr u32 kGranule = 4;
constexpr u32 kPageBytes = 4096;

struct Cell {
    Access write;     // last one
    Access read;      // last one, if all earlier ones happened before it; else see kManyReaders
    u32 flags = 0;
    u32 index = 0;    // into fine cells (kFine)
};

enum CellFlags : u32 {
    kManyReaders = 1,    // read.time is the index of a list
    kFine = 2,           // one cell for each byte
    kAtomicFirst = 4,    // an atomic word begins here
    kAtomicSecond = 8,   // an atomic word began one granule before
    kAtomicWritten = 16, // and has been written atomically
};

// Accesses by several threads, not ordered among themselves: the last one of each. A list while they
// are few; by slot when they are many, as for a word that all threads poll.
class AccessList {
public:
    void add(const Access& a)
    {
        if (!by_slot_.empty()) {
            put(a);
            return;
        }
        for (Access& old : few_)
            if (old.slot == a.slot) {
                old = a;
                return;
            }
        few_.push_back(a);
        if (few_.size() <= kFew) return;
        for (const Access& old : few_) put(old);
        few_.clear();
    }

    // One that did not happen before `t`, or null.
    const Access* unordered(const ThreadClock& t) const
    {
        for (const Access& a : by_slot_.empty() ? few_ : by_slot_)
            if (a.slot != kNobody && !t.after(a.slot, a.time)) return &a;
        return nullptr;
    }

    void clear()
    {
        few_.clear();
        by_slot_.clear();
    }

private:
    static constexpr size_t kFew = 16;

    void put(const Access& a)
    {
        if (by_slot_.size() <= a.slot) by_slot_.resize(a.slot + 1);
        by_slot_[a.slot] = a;
    }

    std::vector<Access> few_;
    std::vector<Access> by_slot_;
};

// A flag or counter: who touched it atomically, and what its value releases.
struct AtomicWord {
    Released released;
    AccessList writes;
    AccessList reads;
};

class Shadow {
public:
    // The cell of the granule at `address`.
    Cell& cell(uintptr_t address)
    {
        const uintptr_t number = address / kPageBytes;
        Cached& cached = cache_[number % cache_.size()];
        if (!cached.page || cached.number != number) cached = {number, make(number)};
        return cached.page->cells[address % kPageBytes / kGranule];
    }

    std::array<Cell, kGranule>& fine(Cell& c)
    {
        if (!(c.flags & kFine)) {
            if (free_fine_.empty()) {
                free_fine_.push_back(static_cast<u32>(fine_.size()));
                fine_.emplace_back();
            }
            c.index = free_fine_.back();
            free_fine_.pop_back();
            c.flags |= kFine;
            for (Cell& byte : fine_[c.index]) {
                byte = Cell();
                byte.write = c.write;
                copy_readers(c, byte);
            }
            forget_readers(c);
        }
        return fine_[c.index];
    }

    // A whole granule was written: one cell is enough again.
    void join_fine(Cell& c)
    {
        for (Cell& byte : fine_[c.index]) forget_readers(byte);
        free_fine_.push_back(c.index);
        c.flags &= ~static_cast<u32>(kFine);
    }

    AccessList& readers(const Cell& c) { return lists_[c.read.time]; }

    // The readers of `c` become a list, to which others are added.
    void many_readers(Cell& c)
    {
        if (free_lists_.empty()) {
            free_lists_.push_back(static_cast<u32>(lists_.size()));
            lists_.emplace_back();
        }
        const u32 index = free_lists_.back();
        free_lists_.pop_back();
        lists_[index].clear();
        lists_[index].add(c.read);
        c.read.time = index;
        c.flags |= kManyReaders;
    }

    void forget_readers(Cell& c)
    {
        if (c.flags & kManyReaders) {
            free_lists_.push_back(c.read.time);
            c.flags &= ~static_cast<u32>(kManyReaders);
        }
        c.read = Access();
    }

    AtomicWord& word(uintptr_t address) { return words_[address]; }

    // The host wrote [begin, end), or (slot kNobody) the range is new: nothing is written.
    void set_written(uintptr_t begin, uintptr_t end, const Access& by)
    {
        const Stamp fresh = {begin, end, by};
        const uintptr_t first = begin / kPageBytes, last = (end + kPageBytes - 1) / kPageBytes;
        if (last - first < pages_.size()) {
            for (uintptr_t p = first; p < last; ++p) {
                const auto found = pages_.find(p);
                if (found != pages_.end()) stamp(*found->second, p, fresh);
            }
        } else {
            for (auto& entry : pages_)
                if (entry.first >= first && entry.first < last)
                    stamp(*entry.second, entry.first, fresh);
        }
        std::vector<Stamp> rest;
        for (const Stamp& s : stamps_) {
            if (s.begin < begin) rest.push_back({s.begin, s.end < begin ? s.end : begin, s.by});
            if (s.end > end) rest.push_back({s.begin > end ? s.begin : end, s.end, s.by});
        }
        if (by.slot != kNobody) rest.push_back(fresh);
        stamps_.swap(rest);
        if ((end - begin) / kGranule < words_.size()) {
            for (uintptr_t a = begin / kGranule * kGranule; a < end; a += kGranule) words_.erase(a);
        } else {
            for (auto it = words_.begin(); it != words_.end();)
                it = it->first >= begin && it->first < end ? words_.erase(it) : std::next(it);
        }
    }

private:
    struct Page {
        Cell cells[kPageBytes / kGranule];
    };
    struct Stamp {
        uintptr_t begin, end;
        Access by;
    };
    struct Cached {
        uintptr_t number = 0;
        Page* page = nullptr;
    };

    Page* make(uintptr_t number)
    {
        std::unique_ptr<Page>& page = pages_[number];
        if (!page) {
            page.reset(new Page);
            for (const Stamp& s : stamps_) stamp(*page, number, s);
        }
        return page.get();
    }

    void stamp(Page& page, uintptr_t number, const Stamp& s)
    {
        const uintptr_t start = number * kPageBytes;
        const uintptr_t begin = s.begin > start ? s.begin - start : 0;
        const uintptr_t end = s.end < start + kPageBytes ? s.end - start : kPageBytes;
        if (s.end <= start || begin >= end) return;
        for (uintptr_t i = begin / kGranule; i < (end + kGranule - 1) / kGranule; ++i) {
            Cell& c = page.cells[i];
            if (c.flags & kFine) join_fine(c);
            forget_readers(c);
            c = Cell();
            c.write = s.by;
        }
    }

    void copy_readers(const Cell& from, Cell& to)
    {
        to.read = from.read;
        if (!(from.flags & kManyReaders)) return;
        const AccessList readers = lists_[from.read.time];
        many_readers(to);
        lists_[to.read.time] = readers;
    }

    std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages_;
    std::array<Cached, 256> cache_;
    std::vector<Stamp> stamps_;  // what the host wrote; they do not overlap
    std::vector<std::array<Cell, kGranule>> fine_;
    std::vector<u32> free_fine_;
    std::vector<AccessList> lists_;
    std::vector<u32> free_lists_;
    std::unordered_map<uintptr_t, AtomicWord> words_;
};

}  // namespace emu
