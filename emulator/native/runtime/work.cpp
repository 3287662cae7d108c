// The work that waits, and the order in which it runs.
//
// Without a seed each piece of work runs when it is queued. With a seed (CUDA_EMULATOR_SEED) it waits until something
// must wait for it. A piece waits for the one before it in its stream, and a node of a graph for its dependencies only,
// so every order of pieces that CUDA allows may happen. The seed chooses: only what is needed, everything else first, or
// any mixture. So a missing wait shows as a wrong number.
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
  std::atomic<bool> asynchronous = false;
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

std::atomic<size_t> pending = 0;
unsigned long long next_id = 0;
// What may run, in the order of the launches, so that a seed gives the same order in each run.
std::map<unsigned long long, WorkPtr>& ready_work() {
  static auto* ready = new std::map<unsigned long long, WorkPtr>;
  return *ready;
}

void make_ready(const WorkPtr& work) {
  if (work->duration.count()) work->not_before = Clock::now() + work->duration;
  ready_work()[work->id] = work;
}

void mark_done(const WorkPtr& work) {
  work->done_at = Clock::now();
  work->done = true;
  for (const auto& follower : work->followers) {
    auto& after = follower->after;
    after.erase(std::find(after.begin(), after.end(), work));
    if (after.empty()) make_ready(follower);
  }
  work->followers.clear();
}

void run(const WorkPtr& work) {
  std::this_thread::sleep_until(work->not_before);
  if (work->run) work->run();
  std::function<void()> finished;  // what it holds is freed outside the lock
  Lock lock(state_mutex());
  finished.swap(work->run);
  ready_work().erase(work->id);
  mark_done(work);
  --pending;
}

// Something that must run before the target can, and may run now.
WorkPtr needed_for(WorkPtr work) {
  while (!work->after.empty()) work = work->after[random_below(work->after.size())];
  return work;
}

enum class Policy { only_needed, others_first, any };

// What may run now, but for kernels that have time left to sleep.
template <class Condition>
std::vector<WorkPtr> candidates(const Condition& condition) {
  std::vector<WorkPtr> chosen;
  for (const auto& [id, work] : ready_work())
    if (condition(*work) && work->not_before <= Clock::now()) chosen.push_back(work);
  return chosen;
}

void step(const WorkPtr& target, Policy policy) {
  WorkPtr next;
  {
    Lock lock(state_mutex());
    if (target->done) return;
    next = needed_for(target);
    if (policy != Policy::only_needed) {
      const auto others =
          candidates([&](const Work& work) { return policy == Policy::any || work.stream != target->stream; });
      if (!others.empty()) next = others[random_below(others.size())];
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
      const auto ready = candidates([](const Work&) { return true; });
      if (ready.empty()) return;
      next = ready[random_below(ready.size())];
    }
    run(next);
  }
}

// What CUDA's legacy stream waits for, and what waits for it.
void add_implicit_waits(const Stream& stream, std::vector<WorkPtr>& after) {
  if (!stream.is_legacy) {
    if (stream.is_blocking()) after.push_back(legacy_stream(stream.device)->last);
    return;
  }
  for (const auto& [handle, other] : streams())
    if (!other->is_legacy && other->device == stream.device && other->is_blocking()) after.push_back(other->last);
}

}  // namespace

bool is_asynchronous() { return order().asynchronous; }

size_t random_below(size_t end) {
  Lock lock(state_mutex());
  return order().random() % end;
}

WorkPtr finished_work() {
  auto work = std::make_shared<Work>();
  work->done_at = Clock::now();
  work->done = true;
  return work;
}

WorkPtr add_work(const Stream& stream, Launch launch) {
  auto work = std::make_shared<Work>();
  Lock lock(state_mutex());
  work->run = std::move(launch.run);
  work->id = next_id++;
  work->stream = &stream;
  work->duration = launch.duration;
  for (const auto& before : std::set<WorkPtr>(launch.after.begin(), launch.after.end())) {
    if (!before || before->done) continue;
    work->after.push_back(before);
    before->followers.push_back(work);
  }
  std::sort(work->after.begin(), work->after.end(), [](auto& a, auto& b) { return a->id < b->id; });
  ++pending;
  if (work->after.empty()) make_ready(work);
  return work;
}

WorkPtr enqueue(Stream& stream, Launch launch) {
  if (!is_asynchronous()) {
    std::this_thread::sleep_for(launch.duration);
    if (launch.run) launch.run();
    return finished_work();
  }
  Lock lock(state_mutex());
  launch.after.push_back(stream.last);
  add_implicit_waits(stream, launch.after);
  stream.last = add_work(stream, std::move(launch));
  return stream.last;
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
    for (const auto& [handle, stream] : streams())
      if (stream->device == device && stream->last) targets.push_back(stream->last);
  }
  for (const auto& target : targets) finish(target);
}

void finish_all() {
  for (int device = 0; device < device_count(); ++device) finish_device(device);
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
  finish_all();
  Lock lock(state_mutex());
  order().asynchronous = seed >= 0;
  if (seed >= 0) order().random.seed(seed);
}
API int cuda_emulator_is_asynchronous(void) { return emulator::is_asynchronous(); }
