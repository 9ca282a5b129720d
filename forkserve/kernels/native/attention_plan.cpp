// From the works of a batch to units of attention.
//
// Works are sorted by the KV rows that they read, so that whatever several of them share is shared
// by neighbours, and what two neighbours have in common says everything about sharing.

#include <algorithm>
#include <new>
#include <numeric>

#include "attention.h"

namespace fs {
namespace {

constexpr int VECTORS = 48;       // query vectors of a tile, unless one row has more
constexpr int FOLD = 32;          // shared rows below which reading them twice costs less
constexpr int UNITS_A_THREAD = 4; // a tile that is a larger share of the batch is cut
constexpr int READ = 6;           // query vectors whose arithmetic takes as long as reading a row

enum Error { OK, SHAPE, PAGES, CONTEXT, WRITE, SCRATCH, TOKENS, MEMORY };

// Positions [begin, end) of a work at slots of the pages from `page` on.
struct Piece {
    int32_t begin, end, shift, page;
};

struct Work {
    int32_t first, count, start;  // batch row, tokens, position of the first
    int32_t piece, pieces;
};

// Rows of one work within a tile; shared: positions from 0 on that it has in common with the one
// before it.
struct Share {
    const Work* work;
    int32_t rows, row;   // how many, the first one within the tile
    int32_t shared;
    int32_t low, end;    // positions that they see
};

class Builder {
   public:
    Builder(Plan& plan, const Spans& spans) : plan_(plan), shape_(plan.shape), spans_(spans) {}

    int build(int64_t* where) {
        if (int error = check(where)) return error;
        if (int error = read(where)) return error;
        sort();
        tiles();
        return OK;
    }

   private:
    int check(int64_t* where) const {
        const PlanShape& s = shape_;
        *where = 0;
        if (s.kv_heads < 1 || s.group < 1 || s.threads < 1 || s.window < 0) return SHAPE;
        if (s.dim < LANES || s.dim > 256 || s.dim % LANES || s.page < LANES || s.page % LANES)
            return SHAPE;
        for (int64_t i = 0; i < spans_.n_pages; i++)
            if (spans_.pages[i] < 0 || spans_.pages[i] >= s.pages) return *where = i, PAGES;
        return OK;
    }

    // A piece of the first rows of run `run`.  False if its pages do not suffice, or where the end of
    // a split is no integer of 32 bits.
    bool add(int run, int length) {
        const int64_t begin = spans_.run_start[run], offset = spans_.run_offset[run];
        const int64_t pages = spans_.run_page[run + 1] - spans_.run_page[run];
        if (offset < 0 || offset + length > pages * shape_.page) return false;
        if (begin + offset + length > INT32_MAX - SPLIT) return false;
        pieces_.push_back({int32_t(begin), int32_t(begin + length), int32_t(offset - begin),
                           spans_.run_page[run]});
        return true;
    }

    int read(int64_t* where) {
        plan_.pages.assign(spans_.pages, spans_.pages + spans_.n_pages);
        plan_.position.clear();
        plan_.slot.clear();
        int64_t use = 0, scratch = int64_t(shape_.scratch) * shape_.page;
        for (int w = 0; w < spans_.works; w++) {
            *where = w;
            Work work{int32_t(plan_.position.size()), spans_.count[w], spans_.start[w],
                      int32_t(pieces_.size()), 0};
            if (work.count < 1 || work.start < 0) return TOKENS;
            int at = 0;
            for (; use < spans_.use_end[w]; use++) {
                int run = spans_.use_run[use], length = spans_.use_length[use];
                if (spans_.run_start[run] != at || length < 1) return CONTEXT;
                if (!add(run, length)) return CONTEXT;
                at += length;
            }
            if (at != work.start) return CONTEXT;
            int run = spans_.write[w];
            if (run >= 0) {
                if (spans_.run_start[run] != at || !add(run, work.count)) return WRITE;
            } else {
                const int page = shape_.page;
                if (scratch + work.count > int64_t(shape_.pages) * page) return SCRATCH;
                int first = int(scratch / page), last = int((scratch + work.count - 1) / page);
                pieces_.push_back({at, at + work.count, int(scratch % page) - at,
                                   int(plan_.pages.size())});
                for (int p = first; p <= last; p++) plan_.pages.push_back(p);
                scratch += work.count;
            }
            work.pieces = int(pieces_.size()) - work.piece;
            for (int i = 0; i < work.count; i++) {
                plan_.position.push_back(work.start + i);
                plan_.slot.push_back(slot(pieces_.back(), work.start + i));
            }
            works_.push_back(work);
        }
        plan_.n = int32_t(plan_.position.size());
        return OK;
    }

    int64_t slot(const Piece& piece, int position) const {
        int64_t at = position + piece.shift, page = shape_.page;
        return plan_.pages[piece.page + at / page] * page + at % page;
    }

    // Positions from 0 on at which two works read the same rows.  order: which of them goes first.
    int common(const Work& a, const Work& b, bool* order) const {
        const Piece *x = &pieces_[a.piece], *y = &pieces_[b.piece];
        const Piece *x_end = x + a.pieces, *y_end = y + b.pieces;
        int at = 0;
        while (x < x_end && y < y_end) {
            int end = std::min(x->end, y->end);
            if (x->page != y->page || x->shift != y->shift)
                while (at < end) {
                    int64_t i = slot(*x, at), j = slot(*y, at);
                    if (i != j) {
                        *order = i < j;
                        return at;
                    }
                    at = int(std::min<int64_t>(end, at + shape_.page - i % shape_.page));
                }
            at = end;
            x += x->end == end;
            y += y->end == end;
        }
        *order = x == x_end && y < y_end;
        return at;
    }

    void sort() {
        sorted_.resize(works_.size());
        std::iota(sorted_.begin(), sorted_.end(), 0);
        std::sort(sorted_.begin(), sorted_.end(), [&](int i, int j) {
            bool order;
            common(works_[i], works_[j], &order);
            return i != j && order;
        });
        shared_.assign(works_.size(), 0);
        bool order;
        for (size_t i = 1; i < sorted_.size(); i++)
            shared_[i] = common(works_[sorted_[i - 1]], works_[sorted_[i]], &order);
    }

    Share share(int index, int at, int rows, int row) const {
        const Work& work = works_[sorted_[index]];
        return {&work, rows, row, at ? 0 : shared_[index], low(work.start + at),
                work.start + at + rows};
    }

    int low(int position) const {
        return shape_.window && position >= shape_.window ? position - shape_.window + 1 : 0;
    }

    // Whether reading positions from `begin` on once for both pays.
    static bool pays(const Share& a, const Share& b, int begin) {
        return b.shared - std::max({a.low, b.low, begin}) >= FOLD;
    }

    struct Tile {
        size_t share, shares;
        int32_t row;  // of plan.order
        int64_t cost;
    };

    void tiles() {
        plan_.order.clear();
        const int most = std::max(1, VECTORS / shape_.group);
        int filled = most;
        for (size_t i = 0; i < sorted_.size(); i++) {
            const Work& work = works_[sorted_[i]];
            for (int at = 0; at < work.count;) {
                if (at == 0 && filled < most && !pays(shares_.back(), share(int(i), 0, 1, 0), 0))
                    filled = most;
                if (filled == most) {
                    tiles_.push_back({shares_.size(), 0, int32_t(plan_.order.size()), 0});
                    filled = 0;
                }
                int rows = std::min(work.count - at, most - filled);
                shares_.push_back(share(int(i), at, rows, filled));
                tiles_.back().shares++;
                for (int j = 0; j < rows; j++) plan_.order.push_back(work.first + at + j);
                filled += rows;
                at += rows;
            }
        }
        units();
    }

    void units() {
        plan_.units.clear();
        plan_.parts.clear();
        plan_.items.clear();
        plan_.cut_rows.clear();
        plan_.first_part.assign(plan_.n, -1);
        plan_.rows_read = 0;
        int64_t total = 0;
        for (Tile& tile : tiles_) {
            for (size_t i = tile.share; i < tile.share + tile.shares; i++) {
                const Share& s = shares_[i];
                int fresh = s.end - std::max(s.low, i > tile.share ? s.shared : 0);
                tile.cost += int64_t(s.rows) * shape_.group * (s.end - s.low) +
                             READ * std::max(fresh, 0);
            }
            total += tile.cost;
        }
        int64_t partials = 0;
        plan_.vectors = 0;
        for (const Tile& tile : tiles_) {
            const Share* from = &shares_[tile.share];
            const Share* end = from + tile.shares;
            // With one thread there is nobody to share a tile with.
            bool cut = shape_.threads > 1 &&
                       tile.cost * shape_.threads * UNITS_A_THREAD > total * shape_.kv_heads;
            if (cut)
                partials = cut_tile(tile, from, end, partials);
            else
                unit(tile.row, from, end, 0, INT32_MAX, false);
        }
        grow(plan_.partial, partials * shape_.kv_heads * plan_.partial_floats() + LANES);
        grow(plan_.scratch, shape_.threads * scratch_floats(plan_.vectors, shape_.dim));
        std::sort(plan_.units.begin(), plan_.units.end(), [](const Unit& a, const Unit& b) {
            return a.cost != b.cost ? a.cost > b.cost : a.part < b.part;
        });
    }

    // Never smaller, so that what is there is not cleared again.
    static void grow(std::vector<float>& floats, int64_t size) {
        if (int64_t(floats.size()) < size) floats.resize(size);
    }

    // A unit for each split, or several where neighbours have nothing in common.
    int64_t cut_tile(const Tile& tile, const Share* from, const Share* end, int64_t partials) {
        int last = 0;
        for (const Share* s = from; s < end; s++) {
            last = std::max(last, (s->end - 1) / SPLIT);
            for (int i = 0; i < s->rows; i++) {
                int row = plan_.order[tile.row + s->row + i];
                int splits = plan_.position[row] / SPLIT - plan_.first_split(row) + 1;
                plan_.first_part[row] = partials;
                plan_.cut_rows.push_back(row);
                partials += splits;
            }
        }
        for (int split = 0; split <= last; split++)
            for (const Share *a = from, *b; a < end; a = b) {
                for (b = a + 1; b < end && pays(b[-1], *b, split * SPLIT);) b++;
                unit(tile.row, a, b, split, split + 1, true);
            }
        return partials;
    }

    // Shares [from, end) of a tile against splits [split, split_end).
    void unit(int32_t tile_row, const Share* from, const Share* end, int split, int split_end,
              bool cut) {
        int low = INT32_MAX, high = 0, rows = 0;
        for (const Share* s = from; s < end; s++) {
            low = std::min(low, s->low);
            high = std::max(high, s->end);
            rows += s->rows;
        }
        Unit unit{tile_row + from->row, rows, int32_t(plan_.parts.size()), 0, cut, 0};
        split_end = std::min(split_end, (high + SPLIT - 1) / SPLIT);
        for (split = std::max(split, low / SPLIT); split < split_end; split++) {
            Part part{split, INT32_MAX, 0, int32_t(plan_.items.size()), 0};
            base_ = from->row;
            items(from, end, split * SPLIT, split * SPLIT + SPLIT);
            for (size_t i = part.item; i < plan_.items.size(); i++) {
                const Item& item = plan_.items[i];
                part.begin = std::min(part.begin, item.begin);
                part.end = std::max(part.end, item.end);
                part.items++;
                plan_.rows_read += item.end - item.begin;
                unit.cost += int64_t(item.rows * shape_.group + READ) * (item.end - item.begin);
            }
            if (!part.items) continue;
            plan_.parts.push_back(part);
            unit.parts++;
        }
        if (!unit.parts) return;
        plan_.vectors = std::max<int64_t>(plan_.vectors, int64_t(rows) * shape_.group);
        plan_.units.push_back(unit);
    }

    // Items of positions [at, end) for shares [from, to): first what all have in common.
    void items(const Share* from, const Share* to, int at, int end) {
        const bool one = to - from == 1;
        int shared = from->end;
        if (!one) {
            shared = INT32_MAX;
            for (const Share* s = from + 1; s < to; s++) shared = std::min(shared, s->shared);
        }
        if (at < std::min(shared, end)) {
            emit(from, to, at, std::min(shared, end));
            at = std::min(shared, end);
        }
        if (one || at >= end) return;
        for (const Share *a = from, *b; a < to; a = b) {
            for (b = a + 1; b < to && b->shared > at;) b++;
            items(a, b, at, end);
        }
    }

    // Positions [at, end) of all shares, run by run, from where the first row begins to see.
    void emit(const Share* from, const Share* to, int at, int end) {
        int low = from->low, rows = 0;
        for (const Share* s = from; s < to; s++) {
            low = std::min(low, s->low);
            rows += s->rows;
        }
        at = std::max(at, low);
        for (const Piece* piece = &pieces_[from->work->piece]; at < end; piece++) {
            if (piece->end <= at) continue;
            int stop = std::min(piece->end, end);
            plan_.items.push_back({from->row - base_, rows, at, stop, piece->shift, piece->page});
            at = stop;
        }
    }

    Plan& plan_;
    const PlanShape& shape_;
    const Spans& spans_;
    std::vector<Piece> pieces_;
    std::vector<Work> works_;
    std::vector<int32_t> sorted_, shared_;  // shared_[i]: rows in common with sorted_[i - 1]
    std::vector<Share> shares_;
    std::vector<Tile> tiles_;
    int32_t base_ = 0;
};

}  // namespace
}  // namespace fs

fs::Plan* fs_plan_new() { return new (std::nothrow) fs::Plan; }

void fs_plan_free(fs::Plan* plan) { delete plan; }

void fs_plan_counts(const fs::Plan* plan, int64_t* out) {
    const int64_t counts[] = {plan->n,
                              int64_t(plan->units.size()),
                              int64_t(plan->parts.size()),
                              int64_t(plan->items.size()),
                              int64_t(plan->cut_rows.size()),
                              plan->rows_read};
    std::copy(std::begin(counts), std::end(counts), out);
}

int fs_plan_build(fs::Plan* plan, const fs::PlanShape* shape, const fs::Spans* spans,
                  int64_t* where) {
    plan->shape = *shape;
    try {
        return fs::Builder(*plan, *spans).build(where);
    } catch (const std::bad_alloc&) {
        return fs::MEMORY;
    }
}
