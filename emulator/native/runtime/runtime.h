// The state of the emulated CUDA runtime. Written from CUDA's public headers and documentation only.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "handles.h"

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
bool is_initialized();  // the driver: by cuInit or the first call to the runtime
void initialize();
void make_context(int device);
bool has_context(int device);

// ---- memory (memory.cpp) ----
enum class MemoryKind { pageable, pinned, device };
MemoryKind kind_of(const void* address);

// ---- work (work.cpp) ----
struct Stream;
using StreamPtr = std::shared_ptr<Stream>;
struct Work;
using WorkPtr = std::shared_ptr<Work>;
// A piece of work that waits. It may run when all of `after` are done, and has then to last for `duration`.
struct Work {
  std::function<void()> run;
  std::vector<WorkPtr> after;      // what is not done
  std::vector<WorkPtr> followers;  // the pieces that have this one in `after`
  unsigned long long id = 0;       // in the order of the launches
  const Stream* stream = nullptr;  // only to tell streams apart
  std::chrono::nanoseconds duration{};
  Clock::time_point not_before{};
  std::atomic<bool> done = false;
  Clock::time_point done_at;
};
struct Launch {
  std::function<void()> run;
  std::vector<WorkPtr> after{};
  std::chrono::nanoseconds duration{};
};

bool is_asynchronous();
WorkPtr enqueue(Stream& stream, Launch launch);  // behind what the stream has, and behind what CUDA lets it wait for
WorkPtr add_work(const Stream& stream, Launch launch);  // behind `after` only. For asynchronous streams
WorkPtr finished_work();
void bound_queues();                 // not under the lock of the state: it runs work if too much of it waits
void finish(const WorkPtr& target);  // returns when the target is done; what else has run by then is the seed's choice
void finish_device(int device);
void finish_all();
bool poll(const WorkPtr& target);  // lets some time pass, and says whether the target is done
size_t random_below(size_t end);

// ---- graphs (graphs.cpp) ----
struct Graph;
struct Node : std::enable_shared_from_this<Node> {
  CUgraphNodeType type;
  std::string name;
  std::function<void()> run;
  std::vector<Node*> dependencies;
  std::shared_ptr<Graph> child;
  dim3 grid, block;
  unsigned id = 0;
  std::chrono::nanoseconds duration{};
  uintptr_t event = 0;   // of a node that records an event outside the graph, or waits for one
  uintptr_t handle = 0;  // none until a program asks for it

  Node(CUgraphNodeType type, std::string name, std::function<void()> run, std::vector<Node*> dependencies = {},
       std::shared_ptr<Graph> child = {}, dim3 grid = {1, 1, 1}, dim3 block = {1, 1, 1})
      : type(type),
        name(std::move(name)),
        run(std::move(run)),
        dependencies(std::move(dependencies)),
        child(std::move(child)),
        grid(grid),
        block(block) {}
};
struct Graph {
  std::vector<std::shared_ptr<Node>> nodes;
  uintptr_t handle = 0;
  Node* add(Node node);
};
cudaGraph_t handle_of(const std::shared_ptr<Graph>& graph);  // valid until cudaGraphDestroy
std::shared_ptr<Graph> find_graph(cudaGraph_t graph);
cudaGraphNode_t handle_of(Node* node);
// False where one of the handles is no node.
bool find_nodes(const cudaGraphNode_t* handles, size_t count, std::vector<Node*>& nodes);
void forget_handles(const Graph& graph);

// ---- streams and captures (streams.cpp, capture.cpp) ----
struct Capture {
  unsigned long long id;
  std::shared_ptr<Graph> graph;
  cudaStreamCaptureMode mode;
  StreamPtr origin;
  std::thread::id thread;
  bool is_invalid = false;
  std::set<StreamPtr> members;
};
struct Stream {
  int device;
  unsigned flags;
  int priority;
  bool is_legacy = false;
  WorkPtr last{};  // the work queued last, which may be done
  std::shared_ptr<Capture> capture{};
  std::vector<Node*> dependencies{};  // of the next node of the capture
  std::vector<cudaGraphNode_t> shown{};
  bool is_blocking() const { return !(flags & cudaStreamNonBlocking); }
};
struct Event {
  unsigned flags;
  int device;
  WorkPtr work{};  // null until the event is recorded
  bool is_captured = false;
  std::weak_ptr<Capture> capture{};
  std::vector<Node*> dependencies{};
  void mark_recorded(WorkPtr by);
};

Handles<StreamPtr>& streams();
StreamPtr legacy_stream(int device);
StreamPtr find_stream(cudaStream_t handle);  // null for a handle that does not exist
std::shared_ptr<Event> find_event(uintptr_t handle);

std::set<std::shared_ptr<Capture>>& captures();
void invalidate(Capture& capture);
void end_capture(const std::shared_ptr<Capture>& capture);  // its streams capture no longer
// 900 where the call is unsafe during a capture of this thread, or of any thread in global mode; the capture is over.
cudaError_t refuse_unsafe(const char* call);
#define REFUSE_UNSAFE()                                                           \
  do {                                                                            \
    if (cudaError_t error_ = ::emulator::refuse_unsafe(__func__)) RETURN(error_); \
  } while (0)
// 906 where work on the legacy stream would wait for a stream that captures; the capture is over.
cudaError_t refuse_implicit(const Stream& stream);

// Put work on a stream: a node if the stream captures, else into its queue.
cudaError_t submit(cudaStream_t stream, Node node, WorkPtr* queued = nullptr);

// ---- kernels (kernels.cpp) ----
void count_launch();
void count_unknown(const char* name);

}  // namespace emulator
