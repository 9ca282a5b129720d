#include "forward.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <system_error>

#include "elementwise.h"

namespace fs {
namespace {

// Up to this many rows a thread, the team shares the columns of every product, with a barrier after
// each; beyond it every thread takes blocks of rows through all products between two attentions.
constexpr int SHARED_ROWS = 48;
constexpr int BLOCK_ROWS = 64;
constexpr int PAIRED_ROWS = 128;  // with weights in bfloat16, whose products go faster
// Up to this many rows every thread makes the input of a product for itself, without a barrier.
constexpr int PRIVATE_ROWS = 8;
constexpr int HEAD_ROWS = 128;  // rows of one pass over the head: their input stays in cache

// Memory that grows and is kept while the model lives: touching fresh pages costs more than the
// arithmetic on them.
template <class T>
class Buffer {
   public:
    ~Buffer() { std::free(data_); }
    void reserve(int64_t count) {
        if (count <= size_) return;
        std::free(data_);
        size_ = 0;
        data_ = static_cast<T*>(std::aligned_alloc(4096, (count * sizeof(T) + 4095) / 4096 * 4096));
        if (!data_) throw std::bad_alloc();
        size_ = count;
    }
    operator T*() const { return data_; }

   private:
    T* data_ = nullptr;
    int64_t size_ = 0;
};

// Where inputs and intermediate results of a block of rows stand.
struct Desk {
    Buffer<float> input, gate, up, added, rounded;

    void reserve(const Model& m, int64_t rows) {
        int64_t widest = std::max({m.hidden, m.ffn, m.heads * m.dim});
        if (takes_ready(m.head)) rounded.reserve(ready_floats(m.head.kind, rows, widest));
        input.reserve(rows * m.hidden);
        gate.reserve(rows * m.ffn);
        up.reserve(rows * m.ffn);
        added.reserve(rows * m.hidden);
    }
};

}  // namespace

class Forward {
   public:
    Forward(const Model& model, int threads) : m_(model), team_(threads), desks_(threads + 1) {}

    void run(const Call& call) {
        int threads = team_.size();
        bool shared = call.n <= SHARED_ROWS * threads;
        int64_t most = threads * (takes_ready(m_.head) ? PAIRED_ROWS : BLOCK_ROWS);
        int64_t parts = (call.n + most - 1) / most * threads;
        block_ = shared ? call.n : ((call.n + parts - 1) / parts + 15) / 16 * 16;
        x_.reserve(call.n * m_.hidden);
        qkv_.reserve(call.n * columns());
        attended_.reserve(call.n * m_.heads * m_.dim);
        int64_t head_rows = std::min<int64_t>(call.wanted, HEAD_ROWS);
        for (int i = 0; i < threads; i++)
            desks_[i].reserve(m_, shared ? PRIVATE_ROWS : std::max<int64_t>(block_, PRIVATE_ROWS));
        desks_[threads].reserve(m_, std::max(shared ? call.n : 0, head_rows));
        auto begin = Meter::Clock::now();
        team_.run([&](int tid) {
            Meter meter(call.seconds ? call.seconds + tid * int(Phase::COUNT) : nullptr, begin);
            work(call, tid, shared);
        });
    }

   private:
    // Who does a block: one thread alone, or the whole team.
    struct Hands {
        int tid;
        bool alone;
    };

    int64_t columns() const { return (m_.heads + 2 * m_.kv_heads) * m_.dim; }
    const Desk& desk(Hands by) const { return desks_[by.alone ? by.tid : team_.size()]; }

    // body(begin, end) over all of 0..count, shared out in pieces of whole `grain`s.
    template <class Body>
    void share(Hands by, int64_t count, int64_t grain, Body body) {
        if (by.alone) return body(0, count);
        for (int64_t i; (i = team_.take() * grain) < count;) body(i, std::min(i + grain, count));
        team_.barrier();
    }
    template <class Body>
    void share_rows(Hands by, int64_t count, Body body) {
        share(by, count, std::max<int64_t>(1, count / (4 * team_.size())), body);
    }
    // x as products with `w` take it.
    const float* prepared(Hands by, const Packed& w, const float* x, int64_t count) {
        if (!takes_ready(w)) return x;
        bool apart = by.alone || count <= PRIVATE_ROWS;
        float* out = apart ? desks_[by.tid].rounded : desk(by).rounded;
        auto fill = [&](int64_t begin, int64_t end) {
            ready(w, x, (int)count, (int)begin, (int)end, out);
        };
        if (apart)
            fill(0, count);
        else
            share_rows(by, count, fill);
        return out;
    }
    // y (+)= w x for `count` prepared rows, all columns; after(begin, end): the panels just done.
    template <class After>
    void product(Hands by, const Packed& w, const float* x, int64_t count, float* y, bool add,
                 After after) {
        During products(w.data == m_.head.data ? Phase::HEAD : Phase::LINEAR);
        int64_t grain = std::max(1, w.panels() / (8 * team_.size()));
        share(by, w.panels(), grain, [&](int64_t begin, int64_t end) {
            linear(w, x, w.k, (int)count, (int)begin, (int)end, y, w.n, add);
            after(begin, end);
        });
    }
    void product(Hands by, const Packed& w, const float* x, int64_t count, float* y, bool add) {
        product(by, w, prepared(by, w, x, count), count, y, add, [](int64_t, int64_t) {});
    }

    // `count` normed rows [hidden] as the input of a product; from(row) is where one stands.
    template <class From>
    const float* normed_rows(Hands by, int64_t count, const float* weight, From from) {
        bool apart = by.alone || count <= PRIVATE_ROWS;
        float* out = apart ? desks_[by.tid].input : desk(by).input;
        int64_t e = m_.hidden;
        auto fill = [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; row++)
                rms_norm(from(row), weight, (int)e, m_.eps, out + row * e);
        };
        if (apart)
            fill(0, count);
        else
            share_rows(by, count, fill);
        return out;
    }
    const float* normed(Hands by, int64_t count, const float* weight, const float* x) {
        return normed_rows(by, count, weight, [&](int64_t row) { return x + row * m_.hidden; });
    }

    // x += w y, normed first where the model has a norm there.
    void residual(Hands by, const Packed& w, const float* y, int64_t count, const float* norm,
                  float* x) {
        if (!norm) return product(by, w, y, count, x, true);
        float* added = desk(by).added;
        product(by, w, y, count, added, false);
        int e = (int)m_.hidden;
        share_rows(by, count, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; row++) {
                rms_norm(added + row * e, norm, e, m_.eps, added + row * e);
                accumulate(x + row * e, added + row * e, e);
            }
        });
    }

    void embed(Hands by, const Call& call, int64_t first, int64_t count) {
        int64_t e = m_.hidden;
        share_rows(by, count, [&](int64_t begin, int64_t end) {
            for (int64_t row = first + begin; row < first + end; row++) {
                float* x = x_ + row * e;
                int64_t id = call.ids[row];
                if (m_.tied)
                    unpack_row(m_.head, id, x);
                else if (m_.embed_bf16)
                    widen((const uint16_t*)m_.embed + id * e, e, x);
                else
                    std::memcpy(x, (const float*)m_.embed + id * e, e * sizeof(float));
                if (m_.embed_scale != 1.0f) multiply(x, m_.embed_scale, (int)e);
            }
        });
    }

    void qkv(Hands by, const Call& call, const Layer& layer, int64_t first, int64_t count) {
        const float* x = normed(by, count, layer.attn_norm, x_ + first * m_.hidden);
        float* y = qkv_ + first * columns();
        product(by, layer.qkv, x, count, y, false);
        int heads = (int)m_.heads, kv_heads = (int)m_.kv_heads, dim = (int)m_.dim;
        share_rows(by, count, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; row++) {
                float* q = y + row * columns();
                for (int h = 0; h < heads + kv_heads; h++) {
                    const float* weight = h < heads ? layer.q_norm : layer.k_norm;
                    if (weight) rms_norm(q + h * dim, weight, dim, m_.eps, q + h * dim);
                }
                int64_t at = (int64_t)call.plans[0]->position[first + row] * (dim / 2);
                rope(q, heads + kv_heads, dim, layer.cos + at, layer.sin + at);
            }
        });
    }

    // What follows the attention: its output product, then the MLP.
    void mlp(Hands by, const Layer& layer, int64_t first, int64_t count) {
        float* x = x_ + first * m_.hidden;
        residual(by, layer.out, attended_ + first * m_.heads * m_.dim, count, layer.post_attn_norm,
                 x);
        const float* h = prepared(by, layer.gate, normed(by, count, layer.ffn_norm, x), count);
        float *gate = desk(by).gate, *up = desk(by).up;
        product(by, layer.gate, h, count, gate, false, [&](int64_t begin, int64_t end) {
            linear(layer.up, h, m_.hidden, (int)count, (int)begin, (int)end, up, m_.ffn, false);
            During activations(Phase::ELEMENTWISE);
            int64_t low = begin * PANEL, high = std::min(end * PANEL, m_.ffn);
            for (int64_t at = low; at < count * m_.ffn; at += m_.ffn)
                activate((int)m_.act, gate + at, up + at, (int)(high - low));
        });
        residual(by, layer.down, gate, count, layer.post_ffn_norm, x);
    }

    void head(Hands by, const Call& call) {
        During all(Phase::HEAD);
        int64_t e = m_.hidden, v = m_.vocab;
        for (int64_t first = 0; first < call.wanted; first += HEAD_ROWS) {
            int64_t count = std::min<int64_t>(HEAD_ROWS, call.wanted - first);
            const int32_t* from = call.rows + first;
            const float* x = normed_rows(by, count, m_.final_norm,
                                         [&](int64_t row) { return x_ + from[row] * e; });
            float* logits = call.logits + first * v;
            x = prepared(by, m_.head, x, count);
            product(by, m_.head, x, count, logits, false, [&](int64_t begin, int64_t end) {
                int64_t low = begin * PANEL, high = std::min(end * PANEL, v);
                if (m_.final_softcap)
                    for (int64_t row = 0; row < count; row++)
                        soft_cap(logits + row * v + low, high - low, m_.final_softcap);
            });
            share_rows(by, count, [&](int64_t begin, int64_t end) {
                for (int64_t row = begin; row < end; row++)
                    call.top[first + row] = largest(logits + row * v, v);
            });
        }
    }

    // body(hands, first row, rows) for every block of rows.
    template <class Body>
    void blocks(int tid, bool shared, int64_t n, Body body) {
        if (shared) return body(Hands{tid, false}, 0, n);
        for (int64_t i; (i = team_.take() * block_) < n;)
            body(Hands{tid, true}, i, std::min(block_, n - i));
        team_.barrier();
    }

    void work(const Call& call, int tid, bool shared) {
        During rest(Phase::ELEMENTWISE);
        blocks(tid, shared, call.n, [&](Hands by, int64_t first, int64_t count) {
            embed(by, call, first, count);
            qkv(by, call, m_.layer[0], first, count);
        });
        int64_t queries = m_.heads * m_.dim, keys = m_.kv_heads * m_.dim;
        for (int64_t i = 0; i < m_.layers; i++) {
            Plan& plan = *call.plans[i];
            KvLayer kv = call.pool->layer(i);
            {
                During writing(Phase::WRITE);
                write_kv(plan, kv, qkv_ + queries, qkv_ + queries + keys, columns(), tid,
                         team_.size());
            }
            team_.barrier();
            {
                During attention(Phase::ATTENTION);
                attend(plan, team_, tid, kv, qkv_, columns(), attended_, queries, m_.attn_scale,
                       m_.attn_softcap);
            }
            blocks(tid, shared, call.n, [&](Hands by, int64_t first, int64_t count) {
                mlp(by, m_.layer[i], first, count);
                if (i + 1 < m_.layers) qkv(by, call, m_.layer[i + 1], first, count);
            });
        }
        head(Hands{tid, false}, call);
    }

    static void widen(const uint16_t* from, int64_t n, float* to) {
        for (int64_t i = 0; i < n; i++) {
            uint32_t bits = (uint32_t)from[i] << 16;
            std::memcpy(to + i, &bits, 4);
        }
    }

    const Model m_;
    Team team_;
    std::vector<Desk> desks_;  // one a thread, and one for all
    Buffer<float> x_, qkv_, attended_;
    int64_t block_ = 0;
};

}  // namespace fs

fs::Forward* fs_forward_new(const fs::Model* model, int threads) {
    return new (std::nothrow) fs::Forward(*model, threads);
}

void fs_forward_free(fs::Forward* forward) { delete forward; }

int fs_forward_run(fs::Forward* forward, const fs::Call* call) {
    try {
        forward->run(*call);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    } catch (const std::system_error&) {
        return 2;
    }
}
