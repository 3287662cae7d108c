// The queues of the streams, and the order in which their work runs.
//
// Without a seed each piece of work runs when it is queued. With a seed (CUDA_EMULATOR_SEED) it waits in its stream's
// queue until something must wait for it. Every order that CUDA allows may then happen, and the seed chooses: only what
// is needed, everything else first, or any mixture. So a missing wait shows as a wrong number.
#include "runtime.h"

#include <algorithm>
#include <cstdlib>
#include <random>

namespace emulator {
namespace {

constexpr size_t MAX_PENDING = 4096;  // bounds the memory that queued work holds

// Held while work runs: the pieces run one after another, whichever threads wait for them.
std::recursive_mutex& run_mutex() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}
struct Order {
  bool asynchronous = false;
  std::mt19937_64 random;
  Order() {
    if (const char* seed = getenv("CUDA_EMULATOR_SEED")) {
      asynchronous = true;
      random.seed(strtoull(seed, nullptr, 10));
    }
  }
};
Order& order() {
  static auto* order = new Order;
  return *order;
}
size_t pending = 0;

bool is_ready(const Work& work) {
  for (const auto& other : work.after)
    if (!other->done) return false;
  return true;
}

// In the order in which the streams were made, so that a seed gives the same order in each run.
std::vector<WorkPtr> ready_work() {
  std::vector<WorkPtr> ready;
  for (auto* stream : streams())
    if (!stream->queue.empty() && is_ready(*stream->queue.front())) ready.push_back(stream->queue.front());
  std::sort(ready.begin(), ready.end(), [](auto& a, auto& b) { return a->stream->id < b->stream->id; });
  return ready;
}

void run(const WorkPtr& work) {
  if (work->run) work->run();
  std::function<void()> finished;  // what it holds is freed outside the lock
  Lock lock(state_mutex());
  finished.swap(work->run);
  work->done = true;
  work->done_at = Clock::now();
  work->after.clear();
  work->stream->queue.pop_front();
  --pending;
}

// The head of a queue that must run before the target can.
WorkPtr needed_for(const WorkPtr& target) {
  WorkPtr work = target;
  while (true) {
    WorkPtr head = work->stream->queue.front();
    const Work* blocked_by = nullptr;
    for (const auto& other : head->after)
      if (!other->done) {
        blocked_by = other.get();
        work = other;
        break;
      }
    if (!blocked_by) return head;
  }
}

enum class Policy { only_needed, others_first, any };

void step(const WorkPtr& target, Policy policy) {
  WorkPtr next;
  {
    Lock lock(state_mutex());
    if (target->done) return;
    next = needed_for(target);
    if (policy != Policy::only_needed) {
      std::vector<WorkPtr> candidates;
      for (auto& work : ready_work())
        if (policy == Policy::any || work->stream != target->stream) candidates.push_back(work);
      if (!candidates.empty()) next = candidates[random_below(candidates.size())];
    }
  }
  run(next);
}

void run_some(size_t count) {
  Lock one_at_a_time(run_mutex());
  for (; count; --count) {
    WorkPtr next;
    {
      Lock lock(state_mutex());
      auto ready = ready_work();
      if (ready.empty()) return;
      next = ready[random_below(ready.size())];
    }
    run(next);
  }
}

// What CUDA's legacy stream waits for, and what waits for it.
void add_implicit_waits(Stream& stream, std::vector<WorkPtr>& after) {
  auto wait_for = [&](const Stream& other) {
    if (other.last && !other.last->done) after.push_back(other.last);
  };
  if (!is_legacy(stream)) {
    if (stream.is_blocking()) wait_for(legacy_stream(stream.device));
    return;
  }
  for (auto* other : streams())
    if (other != &stream && other->device == stream.device && other->is_blocking()) wait_for(*other);
}

}  // namespace

bool is_asynchronous() { return order().asynchronous; }

size_t random_below(size_t end) {
  Lock lock(state_mutex());
  return order().random() % end;
}

WorkPtr enqueue(Stream& stream, std::function<void()> run, std::vector<WorkPtr> after) {
  auto work = std::make_shared<Work>();
  work->stream = &stream;
  if (!is_asynchronous()) {
    if (run) run();
    work->done = true;
    work->done_at = Clock::now();
    return work;
  }
  Lock lock(state_mutex());
  work->run = std::move(run);
  work->after = std::move(after);
  add_implicit_waits(stream, work->after);
  stream.queue.push_back(work);
  stream.last = work;
  ++pending;
  return work;
}

void bound_queues() {
  if (pending > MAX_PENDING) run_some(MAX_PENDING / 2);
}

void finish(const WorkPtr& target) {
  if (!target || target->done) return;
  Lock one_at_a_time(run_mutex());
  const auto policy = static_cast<Policy>(random_below(3));
  while (!target->done) step(target, policy);
}

void finish_device(int device) {
  std::vector<WorkPtr> targets;
  {
    Lock lock(state_mutex());
    for (auto* stream : streams())
      if (stream->device == device && stream->last) targets.push_back(stream->last);
  }
  for (const auto& target : targets) finish(target);
}

bool poll(const WorkPtr& target) {
  if (!target || target->done) return true;
  if (random_below(2)) run_some(1 + random_below(8));
  return target->done;
}

}  // namespace emulator

// A seed of -1 runs work at once again, after everything that waits.
API void cuda_emulator_set_seed(long long seed) {
  using namespace emulator;
  for (int device = 0; device < device_count(); ++device) finish_device(device);
  Lock lock(state_mutex());
  order().asynchronous = seed >= 0;
  if (seed >= 0) order().random.seed(seed);
}
API int cuda_emulator_is_asynchronous(void) { return emulator::is_asynchronous(); }
