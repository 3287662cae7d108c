// Stream capture: which calls it refuses, and how it begins and ends. The rules are those of CUDA's documentation
// ("Stream Capture" in the programming guide, cudaThreadExchangeStreamCaptureMode, the errors 900 to 908).
#include "runtime.h"

namespace emulator {
namespace {

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
unsigned long long next_id = 1;

cudaError_t begin(cudaStream_t handle, std::shared_ptr<Graph> graph, std::vector<Node*> dependencies,
                  cudaStreamCaptureMode mode) {
  const auto stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (stream->is_legacy) return cudaErrorStreamCaptureUnsupported;
  if (stream->capture) return cudaErrorIllegalState;
  auto capture = std::make_shared<Capture>();
  capture->id = next_id++;
  capture->graph = std::move(graph);
  capture->mode = mode;
  capture->origin = stream;
  capture->thread = std::this_thread::get_id();
  capture->members.insert(stream);
  stream->capture = capture;
  stream->dependencies = std::move(dependencies);
  captures().insert(capture);
  trace("capture %llu begins, mode %d", capture->id, (int)mode);
  return cudaSuccess;
}

std::set<Node*> all_before(std::vector<Node*> nodes) {
  std::set<Node*> found;
  while (!nodes.empty()) {
    Node* node = nodes.back();
    nodes.pop_back();
    if (found.insert(node).second) nodes.insert(nodes.end(), node->dependencies.begin(), node->dependencies.end());
  }
  return found;
}

// Work of another member that the stream which began the capture does not wait for.
bool has_unjoined_work(const Capture& capture) {
  const auto joined = all_before(capture.origin->dependencies);
  for (const auto& member : capture.members)
    for (auto* node : member->dependencies)
      if (!joined.count(node)) return true;
  return false;
}

cudaStreamCaptureStatus status_of(const Stream& stream) {
  if (!stream.capture) return cudaStreamCaptureStatusNone;
  return stream.capture->is_invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

// Whether work on this stream, if it is the legacy one, would wait for a stream that captures.
bool blocks_legacy(const Capture& capture, const Stream& stream) {
  if (!stream.is_legacy) return false;
  for (const auto& member : capture.members)
    if (member->is_blocking() && member->device == stream.device) return true;
  return false;
}

// CUDA cannot tell the state of the legacy stream then. The capture goes on.
bool is_ambiguous(const Stream& stream) {
  for (auto& capture : captures())
    if (blocks_legacy(*capture, stream)) return true;
  return false;
}

}  // namespace

std::set<std::shared_ptr<Capture>>& captures() {
  static auto* captures = new std::set<std::shared_ptr<Capture>>;
  return *captures;
}

void invalidate(Capture& capture) {
  capture.is_invalid = true;
  trace("capture %llu is invalid", capture.id);
}

cudaError_t refuse_unsafe(const char* call) {
  Lock lock(state_mutex());
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  bool is_refused = false;
  for (auto& capture : captures()) {
    const bool by_this_thread =
        capture->thread == std::this_thread::get_id() && capture->mode != cudaStreamCaptureModeRelaxed;
    const bool by_any_thread =
        capture->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
    if (!by_this_thread && !by_any_thread) continue;
    invalidate(*capture);
    is_refused = true;
  }
  if (is_refused) trace("%s is unsafe during a capture", call);
  return is_refused ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

cudaError_t refuse_implicit(const Stream& stream) {
  cudaError_t error = cudaSuccess;
  for (auto& capture : captures())
    if (blocks_legacy(*capture, stream)) {
      invalidate(*capture);
      error = cudaErrorStreamCaptureImplicit;
    }
  return error;
}

void end_capture(const std::shared_ptr<Capture>& capture) {
  for (const auto& member : capture->members) {
    member->capture = nullptr;
    member->dependencies.clear();
  }
  captures().erase(capture);
}

cudaError_t submit(cudaStream_t handle, Node node, WorkPtr* queued) {
  StreamPtr stream;
  {
    Lock lock(state_mutex());
    stream = find_stream(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    if (auto error = refuse_implicit(*stream)) return error;
    if (stream->capture) {
      if (stream->capture->is_invalid) return cudaErrorStreamCaptureInvalidated;
      node.dependencies = stream->dependencies;
      stream->dependencies = {stream->capture->graph->add(std::move(node))};
      return cudaSuccess;
    }
  }
  auto work = enqueue(*stream, {std::move(node.run), {}, node.duration});
  if (queued) *queued = work;
  bound_queues();
  return cudaSuccess;
}

}  // namespace emulator

using namespace emulator;

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  Lock lock(state_mutex());
  RETURN(begin(stream, std::make_shared<Graph>(), {}, mode));
}
API cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t handle,
                                              const cudaGraphNode_t* dependencies, const cudaGraphEdgeData*,
                                              size_t count, cudaStreamCaptureMode mode) {
  Lock lock(state_mutex());
  auto graph = find_graph(handle);
  if (!graph) RETURN(cudaErrorInvalidValue);
  std::vector<Node*> nodes;
  if (!find_nodes(dependencies, count, nodes)) RETURN(cudaErrorInvalidValue);
  RETURN(begin(stream, graph, std::move(nodes), mode));
}
API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* out) {
  Lock lock(state_mutex());
  if (out) *out = nullptr;
  const auto stream = find_stream(handle);
  if (!stream) RETURN(cudaErrorInvalidResourceHandle);
  const auto capture = stream->capture;
  if (!capture) RETURN(cudaErrorIllegalState);
  if (capture->origin != stream) {
    invalidate(*capture);
    RETURN(cudaErrorStreamCaptureUnmatched);
  }
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
    RETURN(cudaErrorStreamCaptureWrongThread);
  const bool is_unjoined = has_unjoined_work(*capture);
  end_capture(capture);
  trace("capture %llu ends: %zu nodes", capture->id, capture->graph->nodes.size());
  if (capture->is_invalid) RETURN(cudaErrorStreamCaptureInvalidated);
  if (is_unjoined) RETURN(cudaErrorStreamCaptureUnjoined);
  if (out) *out = handle_of(capture->graph);
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  Lock lock(state_mutex());
  const auto stream = find_stream(handle);
  if (!stream) RETURN(cudaErrorInvalidResourceHandle);
  if (is_ambiguous(*stream)) RETURN(cudaErrorStreamCaptureImplicit);
  *status = status_of(*stream);
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                         const cudaGraphEdgeData** edges, size_t* count) {
  Lock lock(state_mutex());
  const auto stream = find_stream(handle);
  if (!stream) RETURN(cudaErrorInvalidResourceHandle);
  if (is_ambiguous(*stream)) RETURN(cudaErrorStreamCaptureImplicit);
  *status = status_of(*stream);
  if (!stream->capture) return cudaSuccess;
  stream->shown.clear();
  for (auto* node : stream->dependencies) stream->shown.push_back(handle_of(node));
  if (id) *id = stream->capture->id;
  if (graph) *graph = handle_of(stream->capture->graph);
  if (dependencies) *dependencies = stream->shown.data();
  if (edges) *edges = nullptr;
  if (count) *count = stream->shown.size();
  return cudaSuccess;
}
API cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t handle, cudaGraphNode_t* nodes,
                                                    const cudaGraphEdgeData*, size_t count, unsigned flags) {
  Lock lock(state_mutex());
  const auto stream = find_stream(handle);
  if (!stream || !stream->capture) RETURN(cudaErrorIllegalState);
  std::vector<Node*> added;
  if (!find_nodes(nodes, count, added)) RETURN(cudaErrorInvalidValue);
  if (flags == cudaStreamSetCaptureDependencies) stream->dependencies.clear();
  stream->dependencies.insert(stream->dependencies.end(), added.begin(), added.end());
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}
