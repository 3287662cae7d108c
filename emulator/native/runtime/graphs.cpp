// Graphs: nodes, instances, launches, and what tells of them.
#include "runtime.h"

#include <algorithm>
#include <cstdio>

namespace emulator {
namespace {

struct Instance {
  std::shared_ptr<Graph> graph;
  WorkPtr last_launch{};  // a launch waits for the one before it, whatever their streams are
};
Handles<std::shared_ptr<Graph>>& graphs() {
  static auto* graphs = new Handles<std::shared_ptr<Graph>>;
  return *graphs;
}
Handles<std::weak_ptr<Node>>& nodes() {
  static auto* nodes = new Handles<std::weak_ptr<Node>>;
  return *nodes;
}
Handles<std::shared_ptr<Instance>>& instances() {
  static auto* instances = new Handles<std::shared_ptr<Instance>>;
  return *instances;
}
// The driver's functions: names of kernels, which stay.
Handles<std::shared_ptr<std::string>>& functions() {
  static auto* functions = new Handles<std::shared_ptr<std::string>>;
  return *functions;
}

std::shared_ptr<Event> event_of(const Node& node, CUgraphNodeType type) {
  return node.event && node.type == type ? find_event(node.event) : nullptr;
}

void run_now(const Graph& graph) {
  for (const auto& node : graph.nodes) {
    if (node->child) run_now(*node->child);
    std::this_thread::sleep_for(node->duration);
    if (node->run) node->run();
    Lock lock(state_mutex());
    if (const auto event = event_of(*node, CU_GRAPH_NODE_TYPE_EVENT_RECORD)) event->mark_recorded(finished_work());
  }
}

// Each node is a piece of work that waits for its dependencies only, and the nodes without any for `begin`. An event
// counts as recorded when the graph is launched. Returns the end of the graph.
WorkPtr queue_nodes(const Stream& stream, const Graph& graph, const WorkPtr& begin) {
  std::map<const Node*, WorkPtr> pieces;
  Launch end{nullptr, {begin}};
  for (const auto& node : graph.nodes) {
    Launch launch{[node] {
                    if (node->run) node->run();
                  },
                  {},
                  node->duration};
    for (const auto* before : node->dependencies) launch.after.push_back(pieces[before]);
    if (launch.after.empty()) launch.after.push_back(begin);
    if (const auto event = event_of(*node, CU_GRAPH_NODE_TYPE_WAIT_EVENT)) launch.after.push_back(event->work);
    auto piece = add_work(stream, std::move(launch));
    if (node->child) piece = queue_nodes(stream, *node->child, piece);
    if (const auto event = event_of(*node, CU_GRAPH_NODE_TYPE_EVENT_RECORD)) event->mark_recorded(piece);
    end.after.push_back(pieces[node.get()] = piece);
  }
  return add_work(stream, std::move(end));
}

cudaError_t launch(Instance& instance, cudaStream_t handle) {
  StreamPtr stream;
  {
    Lock lock(state_mutex());
    stream = find_stream(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    if (stream->capture) return submit(handle, {CU_GRAPH_NODE_TYPE_GRAPH, "graph", nullptr, {}, instance.graph});
    if (auto error = refuse_implicit(*stream)) return error;
    if (is_asynchronous()) {
      const auto begin = enqueue(*stream, {nullptr, {instance.last_launch}});
      stream->last = instance.last_launch = queue_nodes(*stream, *instance.graph, begin);
    }
  }
  if (is_asynchronous()) bound_queues();
  else run_now(*instance.graph);
  return cudaSuccess;
}

const char* type_name(CUgraphNodeType type) {
  switch (type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: return "KERNEL";
    case CU_GRAPH_NODE_TYPE_MEMCPY: return "MEMCPY";
    case CU_GRAPH_NODE_TYPE_MEMSET: return "MEMSET";
    case CU_GRAPH_NODE_TYPE_HOST: return "HOST";
    case CU_GRAPH_NODE_TYPE_GRAPH: return "GRAPH";
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD: return "EVENT_RECORD";
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT: return "EVENT_WAIT";
    default: return "EMPTY";
  }
}

// The list of CUDA's calls that fill an array: with no array, only its length is told.
template <class From>
cudaError_t fill(const std::vector<From>& from, cudaGraphNode_t* to, size_t* count) {
  for (size_t i = 0; to && i < std::min(*count, from.size()); ++i) to[i] = handle_of(&*from[i]);
  *count = from.size();
  return cudaSuccess;
}

CUfunction function_of(const std::string& name) {
  static auto* handles = new std::map<std::string, uintptr_t>;
  Lock lock(state_mutex());
  auto& handle = (*handles)[name];
  if (!handle) handle = functions().add(std::make_shared<std::string>(name));
  return (CUfunction)handle;
}

std::shared_ptr<Node> find_node(cudaGraphNode_t handle) {
  Lock lock(state_mutex());
  return nodes().find(handle);
}

}  // namespace

Node* Graph::add(Node node) {
  node.id = nodes.size();
  nodes.push_back(std::make_shared<Node>(std::move(node)));
  return nodes.back().get();
}

cudaGraph_t handle_of(const std::shared_ptr<Graph>& graph) {
  if (!graphs().find((void*)graph->handle)) graph->handle = graphs().add(graph);
  return (cudaGraph_t)graph->handle;
}
std::shared_ptr<Graph> find_graph(cudaGraph_t handle) { return graphs().find(handle); }

// Of a node that lies in a graph.
cudaGraphNode_t handle_of(Node* node) {
  if (!node->handle) node->handle = nodes().add(node->weak_from_this());
  return (cudaGraphNode_t)node->handle;
}
bool find_nodes(const cudaGraphNode_t* handles, size_t count, std::vector<Node*>& found) {
  for (size_t i = 0; i < count; ++i) {
    const auto node = find_node(handles[i]);
    if (!node) return false;
    found.push_back(node.get());
  }
  return true;
}
void forget_handles(const Graph& graph) {
  graphs().erase((void*)graph.handle);
  for (const auto& node : graph.nodes) {
    if (node->handle) nodes().erase((void*)node->handle);
    if (node->child) forget_handles(*node->child);
    node->handle = 0;
  }
}

}  // namespace emulator

using namespace emulator;

API cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t* out, size_t* count) {
  Lock lock(state_mutex());
  auto graph = find_graph(handle);
  RETURN(graph ? fill(graph->nodes, out, count) : cudaErrorInvalidValue);
}
API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t handle, cudaGraphNode_t* out, cudaGraphEdgeData*,
                                             size_t* count) {
  Lock lock(state_mutex());
  const auto node = find_node(handle);
  RETURN(node ? fill(node->dependencies, out, count) : cudaErrorInvalidValue);
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t handle, unsigned long long) {
  Lock lock(state_mutex());
  const auto graph = find_graph(handle);
  if (!graph) RETURN(cudaErrorInvalidValue);
  auto copy = std::make_shared<Graph>(Graph{graph->nodes});  // nodes are shared and never change
  *out = (cudaGraphExec_t)instances().add(std::make_shared<Instance>(Instance{std::move(copy)}));
  return cudaSuccess;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
  Lock lock(state_mutex());
  const auto graph = find_graph(handle);
  if (!graph) RETURN(cudaErrorInvalidValue);
  forget_handles(*graph);
  return cudaSuccess;
}
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
  std::shared_ptr<Instance> dropped;  // its nodes are freed outside the lock
  Lock lock(state_mutex());
  dropped = instances().find(handle);
  RETURN(instances().erase(handle) ? cudaSuccess : cudaErrorInvalidValue);
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream) {
  std::shared_ptr<Instance> instance;
  {
    Lock lock(state_mutex());
    instance = instances().find(handle);
  }
  RETURN(instance ? launch(*instance, stream) : cudaErrorInvalidValue);
}
API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t handle, const char* path, unsigned) {
  Lock lock(state_mutex());
  auto graph = find_graph(handle);
  FILE* file = graph ? fopen(path, "w") : nullptr;
  if (!file) RETURN(cudaErrorInvalidValue);
  fputs("digraph dot {\n", file);
  for (auto& node : graph->nodes) {
    fprintf(file, "\"node_%u\" [label=\"%s %s\"];\n", node->id, type_name(node->type), node->name.c_str());
    for (auto* before : node->dependencies) fprintf(file, "\"node_%u\" -> \"node_%u\";\n", before->id, node->id);
  }
  fputs("}\n", file);
  fclose(file);
  return cudaSuccess;
}

// The driver's interface to the same graphs, which the plugin reads through ctypes.
API CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode* out, size_t* count) {
  return (CUresult)cudaGraphGetNodes((cudaGraph_t)graph, (cudaGraphNode_t*)out, count);
}
API CUresult cuGraphNodeGetType(CUgraphNode handle, CUgraphNodeType* type) {
  const auto node = find_node((cudaGraphNode_t)handle);
  if (!node) return CUDA_ERROR_INVALID_VALUE;
  *type = node->type;
  return CUDA_SUCCESS;
}
#undef cuGraphKernelNodeGetParams
API CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS* parameters) {
  const auto node = find_node((cudaGraphNode_t)handle);
  if (!node || node->type != CU_GRAPH_NODE_TYPE_KERNEL) return CUDA_ERROR_INVALID_VALUE;
  *parameters = {};
  parameters->func = function_of(node->name);
  parameters->gridDimX = node->grid.x;
  parameters->gridDimY = node->grid.y;
  parameters->gridDimZ = node->grid.z;
  parameters->blockDimX = node->block.x;
  parameters->blockDimY = node->block.y;
  parameters->blockDimZ = node->block.z;
  return CUDA_SUCCESS;
}
API CUresult cuFuncGetName(const char** name, CUfunction function) {
  Lock lock(state_mutex());
  const auto known = functions().find(function);
  if (!known) return CUDA_ERROR_INVALID_HANDLE;
  *name = known->c_str();
  return CUDA_SUCCESS;
}
API CUresult cuKernelGetName(const char** name, CUkernel kernel) { return cuFuncGetName(name, (CUfunction)kernel); }
API CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode handle, CUgraph* graph) {
  Lock lock(state_mutex());
  const auto node = find_node((cudaGraphNode_t)handle);
  if (!node || !node->child) return CUDA_ERROR_INVALID_VALUE;
  *graph = (CUgraph)handle_of(node->child);
  return CUDA_SUCCESS;
}
