#include "threads.h"

#include <unistd.h>

namespace fs {

void Team::start(Entry entry, void* context) {
    if (workers_ == nullptr || process_ != getpid()) {
        workers_ = new Workers;
        process_ = getpid();
        arrived_ = 0;
        int seen = call_.load();
        try {
            for (int tid = 1; tid < size_; tid++)
                workers_->threads.emplace_back([=] { work(workers_, tid, seen); });
        } catch (...) {  // a part of a team would wait for the rest for ever
            stop();
            throw;
        }
    }
    entry_ = entry;
    context_ = context;
    next_.store(0, std::memory_order_relaxed);
    {
        std::lock_guard<std::mutex> lock(workers_->mutex);
        call_.fetch_add(1, std::memory_order_release);
    }
    workers_->wake.notify_all();
    entry(context, 0);
    barrier();
}

void Team::work(Workers* workers, int tid, int seen) {
    for (;;) {
        // Decoding calls again within microseconds: look for that long before sleeping.
        for (int spins = 0; spins < 1000 && call_.load(std::memory_order_acquire) == seen; spins++)
            std::this_thread::yield();
        if (call_.load(std::memory_order_acquire) == seen) {
            std::unique_lock<std::mutex> lock(workers->mutex);
            workers->wake.wait(
                lock, [&] { return call_.load(std::memory_order_acquire) != seen; });
        }
        seen = call_.load(std::memory_order_acquire);
        if (ended_) return;
        entry_(context_, tid);
        barrier();
    }
}

void Team::stop() {
    if (workers_ == nullptr || process_ != getpid()) return;
    {
        std::lock_guard<std::mutex> lock(workers_->mutex);
        ended_ = true;
        call_.fetch_add(1, std::memory_order_release);
    }
    workers_->wake.notify_all();
    for (auto& worker : workers_->threads) worker.join();
    delete workers_;
    workers_ = nullptr;
    ended_ = false;
}

}  // namespace fs

// Raised together with ABI of library.py.
FS_API int fs_abi() { return 4; }
