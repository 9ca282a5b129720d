// Where the time of a pass goes, thread by thread.  Off unless a call asks for it; then the clock
// is read where one kind of work gives way to another, never within an operator.
#pragma once

#include <chrono>

namespace fs {

// Of one thread.  Mirrored by PHASES of forward.py.
enum class Phase {
    LINEAR,       // products with weights
    ELEMENTWISE,  // norms, rotations, activations, embeddings, inputs made ready
    WRITE,        // K and V to their pages
    ATTENTION,
    HEAD,         // the last norm, logits and the largest of each row
    WAIT,         // for the other threads; for a worker, also until it has woken up
    COUNT
};

class Meter {
   public:
    using Clock = std::chrono::steady_clock;

    // seconds: [Phase::COUNT] that is added to, or null: nothing is measured.  since: when waiting
    // began.  One a thread.
    Meter(double* seconds, Clock::time_point since) : seconds_(seconds), since_(since) {
        current = seconds ? this : nullptr;
    }
    ~Meter() {
        turn(Phase::WAIT);
        current = nullptr;
    }
    Meter(const Meter&) = delete;

    // From here on time counts as `next`.  Returns what it counted as until now.
    Phase turn(Phase next) {
        const Phase before = phase_;
        if (seconds_) {
            const auto now = Clock::now();
            seconds_[int(before)] += std::chrono::duration<double>(now - since_).count();
            since_ = now;
            phase_ = next;
        }
        return before;
    }

    inline static thread_local Meter* current = nullptr;  // null: off

   private:
    double* const seconds_;
    Clock::time_point since_;
    Phase phase_ = Phase::WAIT;
};

// What this thread does until the end of the block.
class During {
   public:
    explicit During(Phase phase) : meter_(Meter::current) {
        if (meter_) before_ = meter_->turn(phase);
    }
    ~During() {
        if (meter_) meter_->turn(before_);
    }
    During(const During&) = delete;

   private:
    Meter* const meter_;
    Phase before_ = Phase::WAIT;
};

}  // namespace fs
