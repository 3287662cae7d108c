// The state of the emulated CUDA runtime. Written from CUDA's public headers and documentation only.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace emulator {

using Clock = std::chrono::steady_clock;
constexpr int MAX_DEVICES = 16;

// One lock for all state. Work never runs under it, so that threads may queue work while another waits.
std::recursive_mutex& state_mutex();
using Lock = std::lock_guard<std::recursive_mutex>;

// ---- errors (errors.cpp) ----
cudaError_t set_error(cudaError_t error, const char* call);
#define RETURN(error) return ::emulator::set_error((error), __func__)
void trace(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---- devices (devices.cpp) ----
int device_count();
int& current_device();

// ---- memory (memory.cpp) ----
enum class MemoryKind { pageable, pinned, device };
MemoryKind kind_of(const void* address);

// ---- work (work.cpp) ----
struct Stream;
// A piece of work in the queue of a stream. It may run when it is at the head and all of `after` are done.
struct Work {
  std::function<void()> run;
  std::vector<std::shared_ptr<Work>> after;
  Stream* stream = nullptr;
  bool done = false;
  Clock::time_point done_at;
};
using WorkPtr = std::shared_ptr<Work>;

bool is_asynchronous();
WorkPtr enqueue(Stream& stream, std::function<void()> run, std::vector<WorkPtr> after = {});
void bound_queues();  // not under the lock of the state: it runs work if too much of it waits
void finish(const WorkPtr& target);  // returns when the target is done; what else has run by then is the seed's choice
void finish_device(int device);
bool poll(const WorkPtr& target);  // lets some time pass, and says whether the target is done
size_t random_below(size_t end);

// ---- graphs (graphs.cpp) ----
struct Graph;
struct Node {
  CUgraphNodeType type;
  std::string name;
  std::function<void()> run;
  std::vector<Node*> dependencies;
  std::shared_ptr<Graph> child;
  dim3 grid{1, 1, 1}, block{1, 1, 1};
  unsigned id = 0;
};
struct Graph {
  std::vector<std::shared_ptr<Node>> nodes;
  Node* add(Node node);
};
void run_graph(const Graph& graph);
void hold(const std::shared_ptr<Graph>& graph);  // until cudaGraphDestroy
std::shared_ptr<Graph> find_graph(cudaGraph_t graph);

// ---- streams and captures (streams.cpp, capture.cpp) ----
struct Capture {
  unsigned long long id;
  std::shared_ptr<Graph> graph;
  cudaStreamCaptureMode mode;
  Stream* origin;
  std::thread::id thread;
  bool is_invalid = false;
  std::set<Stream*> members;
};
struct Stream {
  int device;
  unsigned flags;
  int priority;
  unsigned long long id = next_id();
  std::deque<WorkPtr> queue{};
  WorkPtr last{};  // the work queued last, which may be done
  std::shared_ptr<Capture> capture{};
  std::vector<Node*> dependencies{};  // of the next node of the capture
  std::vector<cudaGraphNode_t> shown{};
  static unsigned long long next_id();
  bool is_blocking() const { return !(flags & cudaStreamNonBlocking); }
};
struct Event {
  unsigned flags;
  WorkPtr work{};  // null until the event is recorded
  bool is_captured = false;
  std::weak_ptr<Capture> capture{};
  std::vector<Node*> dependencies{};
};

std::set<Stream*>& streams();
Stream& legacy_stream(int device);
Stream* find_stream(cudaStream_t handle);  // null for a handle that does not exist
bool is_legacy(const Stream& stream);

std::set<std::shared_ptr<Capture>>& captures();
void invalidate(Capture& capture);
// 900 where the call is unsafe during a capture of this thread, or of any thread in global mode; the capture is over.
cudaError_t refuse_unsafe(const char* call);
#define REFUSE_UNSAFE()                                            \
  do {                                                             \
    if (cudaError_t error_ = ::emulator::refuse_unsafe(__func__)) RETURN(error_); \
  } while (0)
// 906 where work on the legacy stream would wait for a stream that captures.
cudaError_t refuse_implicit(const Stream& stream);

// Put work on a stream: a node if the stream captures, else into its queue.
cudaError_t submit(cudaStream_t stream, Node node, WorkPtr* queued = nullptr);

// ---- kernels (kernels.cpp) ----
void count_launch();
void count_unknown(const char* name);

}  // namespace emulator
