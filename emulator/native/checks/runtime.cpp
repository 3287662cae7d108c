// The runtime without torch, under the sanitizers of the compiler (sanitize.py): threads that copy, wait, capture,
// replay and destroy, in queues and at once. It ends with 1 where a result is wrong.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

extern "C" void cuda_emulator_set_seed(long long seed);
extern "C" int cuda_emulator_launch(cudaStream_t, const char*, void (*)(void*), void*, void (*)(void*));

namespace {

constexpr size_t COUNT = 64, BYTES = COUNT * sizeof(int);

void require(bool holds, const char* what, int line) {
  if (holds) return;
  fprintf(stderr, "line %d: %s\n", line, what);
  exit(1);
}
#define REQUIRE(condition) require((condition), #condition, __LINE__)
#define SUCCEEDS(call) REQUIRE((call) == cudaSuccess)

struct Addition {
  int* numbers;
  int added;
};
void add(void* data) {
  const auto* addition = static_cast<Addition*>(data);
  for (size_t i = 0; i < COUNT; ++i) addition->numbers[i] += addition->added;
}
void drop(void* data) { delete static_cast<Addition*>(data); }
void launch_add(cudaStream_t stream, int* numbers, int added) {
  REQUIRE(cuda_emulator_launch(stream, "add", add, new Addition{numbers, added}, drop) == 0);
}

cudaStream_t new_stream() {
  cudaStream_t stream;
  SUCCEEDS(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}
cudaEvent_t new_event() {
  cudaEvent_t event;
  SUCCEEDS(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}

// Two streams that wait for each other give the same numbers in every order.
void two_streams(int* numbers) {
  const auto first = new_stream(), second = new_stream();
  const auto event = new_event();
  SUCCEEDS(cudaMemsetAsync(numbers, 0, BYTES, first));
  launch_add(first, numbers, 1);
  SUCCEEDS(cudaEventRecord(event, first));
  SUCCEEDS(cudaStreamWaitEvent(second, event, 0));
  launch_add(second, numbers, 2);
  SUCCEEDS(cudaEventRecord(event, second));
  while (cudaEventQuery(event) == cudaErrorNotReady) std::this_thread::yield();
  SUCCEEDS(cudaEventDestroy(event));
  REQUIRE(numbers[COUNT - 1] == 3);
  SUCCEEDS(cudaStreamDestroy(first));
  SUCCEEDS(cudaStreamDestroy(second));
  REQUIRE(cudaStreamSynchronize(first) == cudaErrorInvalidResourceHandle);
}

// A graph with a side stream and a child graph outlives its streams, its event and the captured graph.
void graphs(int* numbers) {
  const auto main = new_stream(), side = new_stream();
  const auto event = new_event();
  cudaGraph_t graph, outer;
  cudaGraphExec_t inner_instance, instance;
  SUCCEEDS(cudaStreamBeginCapture(main, cudaStreamCaptureModeRelaxed));
  SUCCEEDS(cudaMemsetAsync(numbers, 0, BYTES, main));
  SUCCEEDS(cudaEventRecord(event, main));
  SUCCEEDS(cudaStreamWaitEvent(side, event, 0));
  launch_add(side, numbers, 5);
  SUCCEEDS(cudaEventRecord(event, side));
  SUCCEEDS(cudaStreamWaitEvent(main, event, 0));
  SUCCEEDS(cudaStreamEndCapture(main, &graph));
  size_t count = 8;
  cudaGraphNode_t nodes[8];
  SUCCEEDS(cudaGraphGetNodes(graph, nodes, &count));
  REQUIRE(count == 2);
  SUCCEEDS(cudaGraphInstantiateWithFlags(&inner_instance, graph, 0));
  SUCCEEDS(cudaStreamBeginCapture(main, cudaStreamCaptureModeRelaxed));
  SUCCEEDS(cudaGraphLaunch(inner_instance, main));
  launch_add(main, numbers, 10);
  SUCCEEDS(cudaStreamEndCapture(main, &outer));
  SUCCEEDS(cudaGraphInstantiateWithFlags(&instance, outer, 0));
  SUCCEEDS(cudaGraphDestroy(graph));
  SUCCEEDS(cudaGraphDestroy(outer));
  SUCCEEDS(cudaGraphExecDestroy(inner_instance));
  CUgraphNodeType type;
  REQUIRE(cuGraphNodeGetType(nodes[0], &type) == CUDA_ERROR_INVALID_VALUE);
  SUCCEEDS(cudaGraphLaunch(instance, main));
  SUCCEEDS(cudaGraphLaunch(instance, side));
  SUCCEEDS(cudaGraphExecDestroy(instance));
  SUCCEEDS(cudaStreamSynchronize(main));
  SUCCEEDS(cudaStreamSynchronize(side));
  REQUIRE(numbers[0] == 15);
  SUCCEEDS(cudaEventDestroy(event));
  SUCCEEDS(cudaStreamDestroy(main));
  SUCCEEDS(cudaStreamDestroy(side));
}

// Streams that are destroyed while they capture.
void broken_captures() {
  for (const bool destroys_origin : {false, true}) {
    const auto main = new_stream(), side = new_stream();
    const auto event = new_event();
    cudaGraph_t graph = nullptr;
    SUCCEEDS(cudaStreamBeginCapture(main, cudaStreamCaptureModeRelaxed));
    SUCCEEDS(cudaEventRecord(event, main));
    SUCCEEDS(cudaStreamWaitEvent(side, event, 0));
    SUCCEEDS(cudaStreamDestroy(destroys_origin ? main : side));
    const auto kept = destroys_origin ? side : main;
    REQUIRE(cudaStreamEndCapture(kept, &graph) != cudaSuccess);
    REQUIRE(!graph);
    SUCCEEDS(cudaStreamDestroy(kept));
    SUCCEEDS(cudaEventDestroy(event));
  }
}

void memory() {
  void *device, *pinned;
  SUCCEEDS(cudaMalloc(&device, BYTES));
  SUCCEEDS(cudaHostAlloc(&pinned, BYTES, 0));
  const auto stream = new_stream();
  std::vector<int> pageable(COUNT, 7);
  SUCCEEDS(cudaMemcpyAsync(device, pageable.data(), BYTES, cudaMemcpyHostToDevice, stream));
  pageable.assign(COUNT, 0);
  SUCCEEDS(cudaMemcpyAsync(pinned, device, BYTES, cudaMemcpyDeviceToHost, stream));
  SUCCEEDS(cudaStreamSynchronize(stream));
  REQUIRE(static_cast<int*>(pinned)[3] == 7);
  SUCCEEDS(cudaStreamDestroy(stream));
  SUCCEEDS(cudaFree(device));
  SUCCEEDS(cudaFreeHost(pinned));
}

void work(int rounds) {
  void* numbers;
  SUCCEEDS(cudaMalloc(&numbers, BYTES));
  for (int i = 0; i < rounds; ++i) {
    two_streams(static_cast<int*>(numbers));
    graphs(static_cast<int*>(numbers));
    broken_captures();
    memory();
  }
  SUCCEEDS(cudaFree(numbers));
}

}  // namespace

int main() {
  for (const long long seed : {-1, 1, 2, 3}) {
    cuda_emulator_set_seed(seed);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) threads.emplace_back(work, 20);
    for (auto& thread : threads) thread.join();
    SUCCEEDS(cudaDeviceSynchronize());
  }
  cuda_emulator_set_seed(-1);
  puts("the runtime holds");
}
