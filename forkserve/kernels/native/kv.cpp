#include "kv.h"

#include <algorithm>
#include <cstring>

#include "attention.h"
#include "bf16.h"

namespace fs {
namespace {

FS_INLINE void convert(float* to, float x) { *to = x; }
FS_INLINE void convert(uint16_t* to, float x) { *to = to_bf16(x); }

template <class T>
void write(const Plan& plan, const KvLayer& kv, const float* k, const float* v, int64_t stride,
           int first, int end) {
    const int64_t page = plan.shape.page, dim = plan.shape.dim;
    while (first < end) {
        int64_t row = plan.slot[first], within = row % page;
        int rows = 1;  // of one page
        while (first + rows < end && within + rows < page && plan.slot[first + rows] == row + rows)
            rows++;
        for (int64_t h = 0; h < plan.shape.kv_heads; h++) {
            const float* from = k + first * stride + h * dim;
            T* to = static_cast<T*>(kv.k) + h * kv.head + row / page * page * dim + within;
            for (int64_t d = 0; d < dim; d++)
                for (int j = 0; j < rows; j++) convert(to + d * page + j, from[j * stride + d]);
            from = v + first * stride + h * dim;
            to = static_cast<T*>(kv.v) + h * kv.head + row * dim;
            for (int j = 0; j < rows; j++)
                for (int64_t d = 0; d < dim; d++) convert(to + j * dim + d, from[j * stride + d]);
        }
        first += rows;
    }
}

// An element at any address: where a run in a file or a message begins, nobody knows.
template <class T>
struct __attribute__((packed)) Loose {
    T value;
};

// Rows in a pool (K of one head if `step` is the page size, else V) or, with page = 0, in an array.
template <class T>
struct Rows {
    T* base;
    int64_t page, dim;
    T* at(int64_t row) const {
        return page ? base + row / page * page * dim + row % page : base + row * dim;
    }
    int64_t row_step() const { return page ? 1 : dim; }
    int64_t dim_step() const { return page ? page : 1; }
    int64_t within(int64_t row) const { return page ? page - row % page : INT64_MAX; }
};

// From and To are `Word` or `Loose<Word>`.
template <class Word, class From, class To>
void move(Rows<From> from, int64_t source, Rows<To> to, int64_t target, int64_t count) {
    static_assert(sizeof(From) == sizeof(Word) && sizeof(To) == sizeof(Word));
    auto put = [](To* y, const From* x) {
        reinterpret_cast<Loose<Word>*>(y)->value = reinterpret_cast<const Loose<Word>*>(x)->value;
    };
    while (count > 0) {
        int64_t rows = std::min({count, from.within(source), to.within(target)});
        const From* x = from.at(source);
        To* y = to.at(target);
        const int64_t xr = from.row_step(), xd = from.dim_step();
        const int64_t yr = to.row_step(), yd = to.dim_step(), dim = to.dim;
        if (xd == 1 && yd == 1) {
            std::memcpy(static_cast<void*>(y), x, sizeof(Word) * rows * dim);
        } else if (yd == 1) {
            for (int64_t j = 0; j < rows; j++)
                for (int64_t d = 0; d < dim; d++) put(y + j * yr + d, x + j * xr + d * xd);
        } else {  // stores in order: twice as fast as loads in order
            for (int64_t d = 0; d < dim; d++)
                for (int64_t j = 0; j < rows; j++) put(y + j * yr + d * yd, x + j * xr + d * xd);
        }
        source += rows;
        target += rows;
        count -= rows;
    }
}

// each(block, rows of that block, elements before it) for every layer's K and V heads.
template <class T, class Each>
void blocks(const KvPool& pool, Each each) {
    const int64_t size = pool.rows * pool.dim;
    for (int64_t block = 0; block < pool.layers * 2 * pool.kv_heads; block++) {
        bool keys = block % (2 * pool.kv_heads) < pool.kv_heads;
        T* base = static_cast<T*>(pool.base) + block * size;
        each(block, Rows<T>{base, keys ? pool.page : 0, pool.dim});
    }
}

template <class Call>
void by_element(const KvPool& pool, Call call) {
    if (pool.bf16)
        call(uint16_t{});
    else
        call(uint32_t{});
}

}  // namespace

void write_kv(const Plan& plan, const KvLayer& kv, const float* k, const float* v, int64_t stride,
              int tid, int threads) {
    // Neighbouring rows share cache lines of K: each thread takes one range.
    int first = int64_t(plan.n) * tid / threads, end = int64_t(plan.n) * (tid + 1) / threads;
    if (kv.bf16)
        write<uint16_t>(plan, kv, k, v, stride, first, end);
    else
        write<float>(plan, kv, k, v, stride, first, end);
}

}  // namespace fs

void fs_copy_rows(const fs::KvPool* pool, const int64_t* copies, int64_t n) {
    fs::by_element(*pool, [&](auto word) {
        using T = decltype(word);
        fs::blocks<T>(*pool, [&](int64_t, fs::Rows<T> rows) {
            for (int64_t i = 0; i < n; i++)
                fs::move<T>(rows, copies[3 * i], rows, copies[3 * i + 1], copies[3 * i + 2]);
        });
    });
}

void fs_read_rows(const fs::KvPool* pool, const int64_t* runs, int64_t n, void* out) {
    int64_t total = 0;
    for (int64_t i = 0; i < n; i++) total += runs[2 * i + 1];
    fs::by_element(*pool, [&](auto word) {
        using T = decltype(word);
        fs::blocks<T>(*pool, [&](int64_t block, fs::Rows<T> rows) {
            auto* base = static_cast<fs::Loose<T>*>(out) + block * total * pool->dim;
            fs::Rows<fs::Loose<T>> array{base, 0, pool->dim};
            int64_t done = 0;
            for (int64_t i = 0; i < n; i++) {
                fs::move<T>(rows, runs[2 * i], array, done, runs[2 * i + 1]);
                done += runs[2 * i + 1];
            }
        });
    });
}

void fs_write_rows(const fs::KvPool* pool, const int64_t* runs, int64_t n, const void* in,
                   int64_t in_rows, int64_t at) {
    fs::by_element(*pool, [&](auto word) {
        using T = decltype(word);
        fs::blocks<T>(*pool, [&](int64_t block, fs::Rows<T> rows) {
            auto* base = static_cast<const fs::Loose<T>*>(in) + block * in_rows * pool->dim;
            fs::Rows<const fs::Loose<T>> array{base, 0, pool->dim};
            int64_t next = at;
            for (int64_t i = 0; i < n; i++) {
                fs::move<T>(array, next, rows, runs[2 * i], runs[2 * i + 1]);
                next += runs[2 * i + 1];
            }
        });
    });
}
