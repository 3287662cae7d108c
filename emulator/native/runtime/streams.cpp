// Streams and events.
#include "runtime.h"

namespace emulator {

uintptr_t new_handle() {
  static std::atomic<uintptr_t> last = uintptr_t(1) << 48;
  return last += 16;
}

Handles<StreamPtr>& streams() {
  static auto* streams = new Handles<StreamPtr>;
  return *streams;
}

StreamPtr legacy_stream(int device) {
  static auto* legacy = new std::map<int, StreamPtr>;
  Lock lock(state_mutex());
  auto& stream = (*legacy)[device];
  if (!stream) streams().add(stream = std::make_shared<Stream>(Stream{device, cudaStreamDefault, 0, true}));
  return stream;
}

StreamPtr find_stream(cudaStream_t handle) {
  // cudaStreamLegacy and cudaStreamPerThread are the handles 1 and 2; torch uses neither.
  if ((uintptr_t)handle <= 2) return legacy_stream(current_device());
  Lock lock(state_mutex());
  return streams().find(handle);
}

void Event::mark_recorded(WorkPtr by) {
  work = std::move(by);
  is_captured = false;
  capture.reset();
}

namespace {

using EventPtr = std::shared_ptr<Event>;

Handles<EventPtr>& events() {
  static auto* events = new Handles<EventPtr>;
  return *events;
}

// Waiting for a stream that captures ends its capture.
cudaError_t refuse_wait(cudaStream_t handle, WorkPtr* last) {
  Lock lock(state_mutex());
  const auto stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (stream->capture) {
    invalidate(*stream->capture);
    return cudaErrorStreamCaptureUnsupported;
  }
  *last = stream->last;
  return refuse_implicit(*stream);
}

cudaError_t refuse_ask(cudaEvent_t handle, const char* call, WorkPtr* work) {
  {
    Lock lock(state_mutex());
    const auto event = events().find(handle);
    if (!event) return cudaErrorInvalidResourceHandle;
    if (event->is_captured) {
      if (auto capture = event->capture.lock()) invalidate(*capture);
      return cudaErrorCapturedEvent;
    }
    *work = event->work;
  }
  return refuse_unsafe(call);
}

// A node for an event outside the graph: each replay records it, or waits for its latest record.
void capture_external(Stream& stream, CUgraphNodeType type, cudaEvent_t event) {
  Node node{type, "event", nullptr, stream.dependencies};
  node.event = (uintptr_t)event;
  stream.dependencies = {stream.capture->graph->add(std::move(node))};
}

cudaError_t record(Event& event, cudaEvent_t handle, Stream& stream, unsigned flags) {
  if (event.device != stream.device) return cudaErrorInvalidResourceHandle;
  if (auto error = refuse_implicit(stream)) return error;
  if (!stream.capture) {
    event.mark_recorded(enqueue(stream, {}));
    return cudaSuccess;
  }
  if (stream.capture->is_invalid) return cudaErrorStreamCaptureInvalidated;
  if (flags & cudaEventRecordExternal) {
    capture_external(stream, CU_GRAPH_NODE_TYPE_EVENT_RECORD, handle);
    return cudaSuccess;
  }
  event.is_captured = true;
  event.capture = stream.capture;
  event.dependencies = stream.dependencies;
  return cudaSuccess;
}

// A stream waits for work outside its capture: refused, unless the wait is external.
cudaError_t wait_for_work(Stream& stream, const Event& event, cudaEvent_t handle, unsigned flags) {
  if (!stream.capture) {
    if (event.work && !event.work->done) enqueue(stream, {nullptr, {event.work}});
    return cudaSuccess;
  }
  if (stream.capture->is_invalid) return cudaErrorStreamCaptureInvalidated;
  if (flags & cudaEventWaitExternal) {
    capture_external(stream, CU_GRAPH_NODE_TYPE_WAIT_EVENT, handle);
    return cudaSuccess;
  }
  if (!event.work) return cudaSuccess;
  invalidate(*stream.capture);
  return cudaErrorStreamCaptureIsolation;
}

// A stream waits for work inside a capture: it joins the capture.
cudaError_t wait_for_capture(const StreamPtr& waiting, const Event& event, const std::shared_ptr<Capture>& capture) {
  auto& stream = *waiting;
  if (capture->is_invalid) return cudaErrorStreamCaptureInvalidated;
  if (stream.is_legacy) {
    invalidate(*capture);
    return cudaErrorStreamCaptureUnsupported;
  }
  if (stream.capture && stream.capture != capture) {
    invalidate(*capture);
    invalidate(*stream.capture);
    return cudaErrorStreamCaptureMerge;
  }
  if (!stream.capture) {
    stream.capture = capture;
    stream.dependencies.clear();
    capture->members.insert(waiting);
  }
  for (auto* node : event.dependencies) {
    bool is_new = true;
    for (auto* known : stream.dependencies) is_new &= known != node;
    if (is_new) stream.dependencies.push_back(node);
  }
  return cudaSuccess;
}

}  // namespace

EventPtr find_event(uintptr_t handle) { return events().find((const void*)handle); }

}  // namespace emulator

using namespace emulator;

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  Lock lock(state_mutex());
  make_context(current_device());
  *out = (cudaStream_t)streams().add(std::make_shared<Stream>(Stream{current_device(), flags, priority}));
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, cudaStreamDefault, 0); }
// No document says what happens to a capture of the stream. Here it is over.
API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  const auto stream = find_stream(handle);
  if (!stream || stream->is_legacy) RETURN(cudaErrorInvalidResourceHandle);
  finish(stream->last);
  Lock lock(state_mutex());
  if (const auto capture = stream->capture) {
    invalidate(*capture);
    if (capture->origin == stream) end_capture(capture);
    else capture->members.erase(stream);
    stream->capture = nullptr;
  }
  streams().erase(handle);
  return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  const auto stream = find_stream(handle);
  if (!stream) RETURN(cudaErrorInvalidResourceHandle);
  *priority = stream->priority;
  return cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  WorkPtr last;
  if (auto error = refuse_wait(stream, &last)) RETURN(error);
  finish(last);
  RETURN(cudaSuccess);
}
API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  WorkPtr last;
  if (auto error = refuse_wait(stream, &last)) RETURN(error);
  RETURN(poll(last) ? cudaSuccess : cudaErrorNotReady);
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  Lock lock(state_mutex());
  make_context(current_device());
  *out = (cudaEvent_t)events().add(std::make_shared<Event>(Event{flags, current_device()}));
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, cudaEventDefault); }
API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  Lock lock(state_mutex());
  RETURN(events().erase(handle) ? cudaSuccess : cudaErrorInvalidResourceHandle);
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned flags) {
  Lock lock(state_mutex());
  const auto event = events().find(handle);
  const auto stream = find_stream(stream_handle);
  RETURN(event && stream ? record(*event, handle, *stream, flags) : cudaErrorInvalidResourceHandle);
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}
API cudaError_t cudaEventQuery(cudaEvent_t event) {
  WorkPtr work;
  if (auto error = refuse_ask(event, __func__, &work)) RETURN(error);
  RETURN(poll(work) ? cudaSuccess : cudaErrorNotReady);
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  WorkPtr work;
  if (auto error = refuse_ask(event, __func__, &work)) RETURN(error);
  finish(work);
  RETURN(cudaSuccess);
}
API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  Lock lock(state_mutex());
  const auto first = events().find(from), second = events().find(to);
  const bool usable = first && second && first->work && second->work && first->device == second->device;
  if (!usable || ((first->flags | second->flags) & cudaEventDisableTiming)) RETURN(cudaErrorInvalidResourceHandle);
  if (!first->work->done || !second->work->done) RETURN(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(second->work->done_at - first->work->done_at).count();
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t event_handle, unsigned flags) {
  Lock lock(state_mutex());
  const auto stream = find_stream(stream_handle);
  const auto event = events().find(event_handle);
  if (!stream || !event) RETURN(cudaErrorInvalidResourceHandle);
  if (!event->is_captured) RETURN(wait_for_work(*stream, *event, event_handle, flags));
  auto capture = event->capture.lock();
  if (!capture) RETURN(stream->capture ? cudaErrorStreamCaptureIsolation : cudaErrorCapturedEvent);
  RETURN(wait_for_capture(stream, *event, capture));
}
