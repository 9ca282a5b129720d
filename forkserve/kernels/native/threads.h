// The threads of one model: the caller and some workers run the same function side by side.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "meter.h"
#include "simd.h"

namespace fs {

class Team {
   public:
    explicit Team(int size) : size_(size) {}
    ~Team() { stop(); }
    Team(const Team&) = delete;

    int size() const { return size_; }

    // work(tid) on every thread, tid 0..size-1; returns when all are done.  One caller at a time.
    // Throws std::system_error where the system gives no thread; the next call tries again.
    template <class Work>
    void run(Work&& work) {
        if (size_ == 1) return work(0);
        start([](void* context, int tid) { (*static_cast<Work*>(context))(tid); }, &work);
    }

    // Waits for the whole team.  The next `take` gives 0 again.
    void barrier() {
        int phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            return;
        }
        During waiting(Phase::WAIT);
        wait_while([&] { return phase_.load(std::memory_order_acquire) == phase; });
    }

    // 0, 1, 2, ...: each number to one thread, until the next barrier.  Which thread gets which
    // must not matter to any result.
    int take() { return next_.fetch_add(1, std::memory_order_relaxed); }

   private:
    using Entry = void (*)(void*, int);

    // Left as it is in the child of a fork, whose copy has no threads and may be locked.
    struct Workers {
        std::mutex mutex;
        std::condition_variable wake;
        std::vector<std::thread> threads;
    };

    void start(Entry entry, void* context);
    void stop();
    void work(Workers* workers, int tid, int seen);

    // Spins for some microseconds, then yields: another program may have one of our cores.
    template <class Condition>
    static void wait_while(Condition waiting) {
        for (int spins = 0; waiting(); spins++) {
            if (spins >= 2000) {
                std::this_thread::yield();
                continue;
            }
#if defined(__AVX2__)
            _mm_pause();
#else
            __asm__ __volatile__("yield");
#endif
        }
    }

    const int size_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> phase_{0};
    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<int> call_{0};  // number of the current run
    Entry entry_ = nullptr;
    void* context_ = nullptr;
    bool ended_ = false;
    Workers* workers_ = nullptr;
    long process_ = 0;
};

}  // namespace fs
