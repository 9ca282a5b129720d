// Digests of what the kernels of a library give, one a line: `bits libforkserve-avx2.so`.
//
// Inputs are drawn here, so two machines that agree print the same.  scripts/arm_leg.sh compares them.
// Shapes have tails: outputs, inputs, rows and positions that fill no vector, block, page or split.

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "forward.h"

namespace {

template <class Function>
Function* find(void* library, const char* name) {
    void* found = dlsym(library, name);
    if (found) return reinterpret_cast<Function*>(found);
    std::fprintf(stderr, "%s\n", dlerror());
    std::exit(1);
}
#define FS_FIND(name) decltype(::name)* name = find<decltype(::name)>(library, #name)

struct Kernels {
    void* library;
    FS_FIND(fs_packed_bytes);
    FS_FIND(fs_pack);
    FS_FIND(fs_linear);
    FS_FIND(fs_plan_new);
    FS_FIND(fs_plan_free);
    FS_FIND(fs_plan_build);
    FS_FIND(fs_attend);
    FS_FIND(fs_copy_rows);
    FS_FIND(fs_read_rows);
    FS_FIND(fs_write_rows);
    FS_FIND(fs_forward_new);
    FS_FIND(fs_forward_free);
    FS_FIND(fs_forward_run);
};

using Floats = std::vector<float>;
constexpr int THREADS = 2;
const char* const KIND[] = {"float32", "bfloat16", "int8", "w8a16"};

// FNV-1a of 64 bits.
void say(const std::string& name, const void* data, size_t bytes) {
    uint64_t digest = 0xcbf29ce484222325;
    for (size_t i = 0; i < bytes; i++)
        digest = (digest ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3;
    std::printf("%016llx %s\n", (unsigned long long)digest, name.c_str());
}
void say(const std::string& name, const Floats& x) { say(name, x.data(), x.size() * 4); }

void check(int fault, const char* what) {
    if (!fault) return;
    std::fprintf(stderr, "%s failed: %d\n", what, fault);
    std::exit(1);
}

// Evenly in -scale..scale, by Knuth's linear congruential generator.
Floats draw(size_t count, float scale = 1, uint64_t seed = 1) {
    Floats x(count);
    for (float& value : x) {
        seed = seed * 6364136223846793005 + 1442695040888963407;
        value = (float)(int64_t(seed >> 40) - (1 << 23)) / (1 << 23) * scale;
    }
    return x;
}

// Weights [n][k] in a kind; `packed` names the memory of the others.
struct Weights {
    std::vector<uint64_t> data;
    Floats bias;
    fs::Packed packed;

    Weights(const Kernels& use, int kind, int n, int k, bool with_bias, uint64_t seed) {
        const Floats w = draw(size_t(n) * k, 0.2f, seed);
        data.resize(use.fs_packed_bytes(kind, n, k) / 8 + 1);
        check(use.fs_pack(kind, w.data(), n, k, data.data(), THREADS), "pack");
        if (with_bias) {
            bias = draw(n, 1, seed + 1);
            bias.resize((n + fs::PANEL - 1) / fs::PANEL * fs::PANEL);
        }
        packed = {data.data(), with_bias ? bias.data() : nullptr, n, k, kind};
    }
};

void linear(const Kernels& use) {
    const int sizes[][2] = {{48, 64}, {50, 75}, {1, 1}, {7, 577}, {145, 33}};
    for (int kind = 0; kind < 4; kind++)
        for (auto [n, k] : sizes) {
            const Weights w(use, kind, n, k, n % 2, n);
            for (int rows : {1, 2, 3, 4, 8, 9, 33}) {
                Floats x = draw(size_t(rows) * k, 3, rows), y(size_t(rows) * n);
                x[0] *= 1e4f;
                check(use.fs_linear(&w.packed, x.data(), rows, y.data(), THREADS), "linear");
                say(std::string("linear ") + KIND[kind] + " " + std::to_string(n) + "x" +
                        std::to_string(k) + " rows " + std::to_string(rows), y);
            }
        }
}

// A trunk of `TRUNK` positions, and three works on it: a branch that decodes, a prefill of 21 tokens
// whose rows are written, and a replay of 3 whose rows are not.
constexpr int TRUNK = 1100, BRANCH = 37, PREFILL = 21, REPLAY = 3, ROWS = 1 + PREFILL + REPLAY;

struct Batch {
    std::vector<int32_t> count{1, PREFILL, REPLAY}, start{TRUNK + BRANCH, TRUNK, TRUNK};
    std::vector<int32_t> use_end{2, 3, 4}, write{2, 3, -1}, use_run{0, 1, 0, 0};
    std::vector<int32_t> use_length{TRUNK, BRANCH, TRUNK, TRUNK};
    std::vector<int32_t> run_start{0, TRUNK, TRUNK + BRANCH, TRUNK}, run_offset{5, 0, 3, 9};
    std::vector<int32_t> run_page, pages;
    int scratch = 0, all = 0;

    explicit Batch(int page) {
        const int length[] = {TRUNK, BRANCH, 1, PREFILL};
        for (int run = 0; run < 4; run++) {
            run_page.push_back((int)pages.size());
            for (int i = 0; i < run_offset[run] + length[run]; i += page) pages.push_back(0);
        }
        run_page.push_back((int)pages.size());
        scratch = (int)pages.size();
        all = scratch + REPLAY / page + 1;
        for (int i = 0; i < scratch; i++) pages[i] = scratch - 1 - i;  // not in order
    }
    fs::Spans spans() const {
        return {3, 4, 4, (int64_t)pages.size(), count.data(), start.data(), use_end.data(),
                write.data(), use_run.data(), use_length.data(), run_start.data(),
                run_offset.data(), run_page.data(), pages.data()};
    }
};

// KV of `layers`, filled with rows that the works may read.
struct Memory {
    std::vector<uint32_t> words;
    fs::KvPool pool;

    Memory(int layers, int kv_heads, int dim, int page, int pages, bool bf16, bool paired) {
        const int64_t rows = int64_t(page) * pages, count = layers * 2 * kv_heads * rows * dim;
        const Floats x = draw(count, 1, dim);
        words.resize(bf16 ? count / 2 : count);
        for (int64_t i = 0; i < count; i++) {
            uint32_t bits;
            std::memcpy(&bits, &x[i], 4);
            if (bf16)
                words[i / 2] |= (bits >> 16) << i % 2 * 16;
            else
                words[i] = bits;
        }
        pool = {words.data(), layers, kv_heads, dim, page, rows, bf16, paired};
    }
    size_t bytes() const { return words.size() * 4; }
};

// A plan of `Batch`.
struct Planned {
    const Kernels& use;
    fs::Plan* plan;

    Planned(const Kernels& kernels, const Batch& batch, int kv_heads, int group, int dim, int page,
            int window)
        : use(kernels), plan(kernels.fs_plan_new()) {
        const fs::PlanShape shape{kv_heads, group, dim, page, batch.all, batch.scratch, THREADS,
                                  window};
        const fs::Spans spans = batch.spans();
        int64_t where;
        check(use.fs_plan_build(plan, &shape, &spans, &where), "plan");
    }
    ~Planned() { use.fs_plan_free(plan); }
    Planned(const Planned&) = delete;
};

void attention(const Kernels& use) {
    constexpr int KV_HEADS = 2;
    const char* const rows_as[] = {"float32", "bfloat16", "paired"};
    for (int form = 0; form < 3; form++)
        for (int dim : {16, 64, 80})
            for (int group : {1, 3})
                for (int page : {16, 48})
                    for (int window : {0, 600}) {
                        const float softcap = group > 1 ? 5 : 0;
                        const Batch batch(page);
                        Memory memory(1, KV_HEADS, dim, page, batch.all, form > 0, form == 2);
                        const Planned on(use, batch, KV_HEADS, group, dim, page, window);
                        const Floats q = draw(size_t(ROWS) * KV_HEADS * group * dim, 4, 3);
                        const Floats k = draw(size_t(ROWS) * KV_HEADS * dim, 1, 4);
                        Floats out(q.size());
                        check(use.fs_attend(on.plan, &memory.pool, 0, q.data(), k.data(), k.data(),
                                            out.data(), 0.125f, softcap),
                              "attend");
                        const std::string name =
                            std::string(rows_as[form]) + " dim " + std::to_string(dim) +
                            " group " + std::to_string(group) + " page " + std::to_string(page) +
                            " window " + std::to_string(window);
                        say("attention " + name, out);
                        say("rows " + name, memory.words.data(), memory.bytes());
                    }
}

void rows(const Kernels& use) {
    for (bool bf16 : {false, true}) {
        Memory memory(3, 2, 48, 32, 6, bf16, false);
        const int64_t copies[] = {0, 96, 32, 98, 162, 7}, runs[] = {5, 32, 65, 1};
        use.fs_copy_rows(&memory.pool, copies, 2);
        std::vector<char> out(3 * 4 * 33 * 48 * memory.pool.element() + 1);
        char* at = out.data() + 1;  // as in a file that is mapped: nowhere in particular
        use.fs_read_rows(&memory.pool, runs, 2, at);
        say(bf16 ? "read bfloat16" : "read float32", at, out.size() - 1);
        const int64_t to[] = {130, 30};
        use.fs_write_rows(&memory.pool, to, 1, at, 33, 2);
        say(bf16 ? "written bfloat16" : "written float32", memory.words.data(), memory.bytes());
    }
}

// A decoder with every norm, a window in its second layer and soft caps.
void forward(const Kernels& use) {
    constexpr int HIDDEN = 96, FFN = 200, HEADS = 6, KV_HEADS = 2, DIM = 32, VOCAB = 301, PAGE = 16;
    constexpr int Q = HEADS * DIM, KV = KV_HEADS * DIM, LAST = TRUNK + BRANCH + PREFILL;
    const Floats norm = draw(HIDDEN, 1, 5), head_norm = draw(DIM, 1, 6);
    const Floats angle = draw(size_t(LAST) * DIM / 2, 1, 7);
    for (int kind = 0; kind < 4; kind++) {
        std::vector<Weights> w;
        for (int layer = 0; layer < 2; layer++) {
            const int sizes[][2] = {{Q + 2 * KV, HIDDEN}, {HIDDEN, Q}, {FFN, HIDDEN}, {FFN, HIDDEN},
                                    {HIDDEN, FFN}};
            for (auto [n, k] : sizes) w.emplace_back(use, kind, n, k, n == Q + 2 * KV, w.size());
        }
        const Weights head(use, kind, VOCAB, HIDDEN, false, 9);
        std::vector<fs::Layer> layers;
        for (int i = 0; i < 2; i++) {
            const float *n = norm.data(), *h = head_norm.data(), *extra = i ? n : nullptr;
            const Weights* of = &w[i * 5];
            layers.push_back({n, i ? h : nullptr, i ? h : nullptr, extra, n, extra, angle.data(),
                              angle.data(), of[0].packed, of[1].packed, of[2].packed, of[3].packed,
                              of[4].packed});
        }
        const fs::Model model{2, HIDDEN, FFN, HEADS, KV_HEADS, DIM, VOCAB, kind % 2, 1e-5f, 2.0f,
                              0.2f, kind % 2 ? 20.0f : 0.0f, kind % 2 ? 30.0f : 0.0f, 1,
                              layers.data(), norm.data(), nullptr, 0, head.packed};
        const Batch batch(PAGE);
        Memory memory(2, KV_HEADS, DIM, PAGE, batch.all, kind > 0, kind == 1 || kind == 3);
        const Planned whole(use, batch, KV_HEADS, HEADS / KV_HEADS, DIM, PAGE, 0);
        const Planned window(use, batch, KV_HEADS, HEADS / KV_HEADS, DIM, PAGE, 600);
        fs::Plan* const plans[] = {whole.plan, window.plan};
        std::vector<int32_t> ids(ROWS), wanted{0, 5, ROWS - 1}, top(3);
        for (int i = 0; i < ROWS; i++) ids[i] = i * 37 % VOCAB;
        Floats logits(wanted.size() * VOCAB);
        const fs::Call call{ROWS, ids.data(), plans, &memory.pool, (int64_t)wanted.size(),
                            wanted.data(), logits.data(), top.data(), nullptr};
        fs::Forward* pass = use.fs_forward_new(&model, THREADS);
        check(use.fs_forward_run(pass, &call), "forward");
        use.fs_forward_free(pass);
        say(std::string("logits ") + KIND[kind], logits);
        say(std::string("top ") + KIND[kind], top.data(), top.size() * 4);
        say(std::string("rows ") + KIND[kind], memory.words.data(), memory.bytes());
    }
}

}  // namespace

int main(int count, char** words) {
    void* library = count == 2 ? dlopen(words[1], RTLD_NOW) : nullptr;
    if (!library) {
        std::fprintf(stderr, "%s\n", count == 2 ? dlerror() : "give a library");
        return 1;
    }
    const Kernels use{library};
    linear(use);
    attention(use);
    rows(use);
    forward(use);
}
