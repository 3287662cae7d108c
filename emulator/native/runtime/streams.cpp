// Streams and events.
#include "runtime.h"

namespace emulator {

unsigned long long Stream::next_id() {
  static unsigned long long next = 0;
  Lock lock(state_mutex());
  return next++;
}

std::set<Stream*>& streams() {
  static auto* streams = new std::set<Stream*>;
  return *streams;
}

Stream& legacy_stream(int device) {
  static auto* legacy = new std::map<int, Stream*>;
  Lock lock(state_mutex());
  auto& stream = (*legacy)[device];
  if (!stream) streams().insert(stream = new Stream{device, cudaStreamDefault, 0});
  return *stream;
}
bool is_legacy(const Stream& stream) { return &stream == &legacy_stream(stream.device); }

Stream* find_stream(cudaStream_t handle) {
  // cudaStreamLegacy and cudaStreamPerThread are the handles 1 and 2; torch uses neither.
  if ((uintptr_t)handle <= 2) return &legacy_stream(current_device());
  Lock lock(state_mutex());
  auto* stream = (Stream*)handle;
  return streams().count(stream) ? stream : nullptr;
}

namespace {

std::set<Event*>& events() {
  static auto* events = new std::set<Event*>;
  return *events;
}
Event* find_event(cudaEvent_t handle) {
  auto* event = (Event*)handle;
  return events().count(event) ? event : nullptr;
}

// Waiting for a stream that captures ends its capture.
cudaError_t refuse_wait(cudaStream_t handle, WorkPtr* last) {
  Lock lock(state_mutex());
  Stream* stream = find_stream(handle);
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
    Event* event = find_event(handle);
    if (!event) return cudaErrorInvalidResourceHandle;
    if (event->is_captured) {
      if (auto capture = event->capture.lock()) invalidate(*capture);
      return cudaErrorCapturedEvent;
    }
    *work = event->work;
  }
  return refuse_unsafe(call);
}

void mark_recorded(Event* event, WorkPtr work) {
  event->work = std::move(work);
  event->is_captured = false;
  event->capture.reset();
}

// A node that records an event at each replay, for timing inside a graph.
void capture_external_record(Stream& stream, Event* event) {
  auto record = [event] {
    Lock lock(state_mutex());
    if (!events().count(event)) return;
    auto done = std::make_shared<Work>();
    done->done = true;
    done->done_at = Clock::now();
    mark_recorded(event, done);
  };
  Node* node = stream.capture->graph->add({CU_GRAPH_NODE_TYPE_EVENT_RECORD, "event", record, stream.dependencies, nullptr});
  stream.dependencies = {node};
}

cudaError_t record(Event* event, Stream& stream, unsigned flags) {
  if (auto error = refuse_implicit(stream)) return error;
  if (!stream.capture) {
    mark_recorded(event, enqueue(stream, nullptr));
    return cudaSuccess;
  }
  if (stream.capture->is_invalid) return cudaErrorStreamCaptureInvalidated;
  if (flags & cudaEventRecordExternal) {
    capture_external_record(stream, event);
    return cudaSuccess;
  }
  event->is_captured = true;
  event->capture = stream.capture;
  event->dependencies = stream.dependencies;
  return cudaSuccess;
}

// A stream waits for work outside its capture: refused, unless the wait is external.
cudaError_t wait_for_work(Stream& stream, const Event& event, unsigned flags) {
  if (!stream.capture) {
    if (event.work && !event.work->done) enqueue(stream, nullptr, {event.work});
    return cudaSuccess;
  }
  if (!event.work || (flags & cudaEventWaitExternal)) return cudaSuccess;
  if (stream.capture->is_invalid) return cudaErrorStreamCaptureInvalidated;
  invalidate(*stream.capture);
  return cudaErrorStreamCaptureIsolation;
}

// A stream waits for work inside a capture: it joins the capture.
cudaError_t wait_for_capture(Stream& stream, const Event& event, const std::shared_ptr<Capture>& capture) {
  if (capture->is_invalid) return cudaErrorStreamCaptureInvalidated;
  if (is_legacy(stream)) {
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
    capture->members.insert(&stream);
  }
  for (auto* node : event.dependencies) {
    bool is_new = true;
    for (auto* known : stream.dependencies) is_new &= known != node;
    if (is_new) stream.dependencies.push_back(node);
  }
  return cudaSuccess;
}

}  // namespace
}  // namespace emulator

using namespace emulator;

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  Lock lock(state_mutex());
  auto* stream = new Stream{current_device(), flags, priority};
  streams().insert(stream);
  *out = (cudaStream_t)stream;
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, cudaStreamDefault, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  Stream* stream = find_stream(handle);
  if (!stream || is_legacy(*stream)) RETURN(cudaErrorInvalidResourceHandle);
  finish(stream->last);
  Lock lock(state_mutex());
  streams().erase(stream);
  delete stream;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  Stream* stream = find_stream(handle);
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
  auto* event = new Event{flags};
  events().insert(event);
  *out = (cudaEvent_t)event;
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, cudaEventDefault); }
API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  Lock lock(state_mutex());
  Event* event = find_event(handle);
  if (!event) RETURN(cudaErrorInvalidResourceHandle);
  events().erase(event);
  delete event;
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned flags) {
  Lock lock(state_mutex());
  Event* event = find_event(handle);
  Stream* stream = find_stream(stream_handle);
  RETURN(event && stream ? record(event, *stream, flags) : cudaErrorInvalidResourceHandle);
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
  const Event *first = find_event(from), *second = find_event(to);
  const bool usable = first && second && first->work && second->work;
  if (!usable || ((first->flags | second->flags) & cudaEventDisableTiming)) RETURN(cudaErrorInvalidResourceHandle);
  if (!first->work->done || !second->work->done) RETURN(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(second->work->done_at - first->work->done_at).count();
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t event_handle, unsigned flags) {
  Lock lock(state_mutex());
  Stream* stream = find_stream(stream_handle);
  const Event* event = find_event(event_handle);
  if (!stream || !event) RETURN(cudaErrorInvalidResourceHandle);
  if (!event->is_captured) RETURN(wait_for_work(*stream, *event, flags));
  auto capture = event->capture.lock();
  if (!capture) RETURN(stream->capture ? cudaErrorStreamCaptureIsolation : cudaErrorCapturedEvent);
  RETURN(wait_for_capture(*stream, *event, capture));
}
