// Graphs: nodes, instances, launches, and what tells of them.
#include "runtime.h"

#include <algorithm>
#include <cstdio>

namespace emulator {
namespace {

struct Instance {
  std::shared_ptr<Graph> graph;
};
std::map<Graph*, std::shared_ptr<Graph>>& held_graphs() {
  static auto* held = new std::map<Graph*, std::shared_ptr<Graph>>;
  return *held;
}

void run_node(const Node& node) {
  if (node.child) run_graph(*node.child);
  if (node.run) node.run();
}

// Any order that the dependencies allow: a side stream that is not waited for shows as a wrong number.
void run_in_random_order(const Graph& graph) {
  std::map<const Node*, size_t> open;  // dependencies that have not run
  std::map<const Node*, std::vector<const Node*>> after;
  std::vector<const Node*> ready;
  for (auto& node : graph.nodes) {
    open[node.get()] = node->dependencies.size();
    for (auto* before : node->dependencies) after[before].push_back(node.get());
    if (node->dependencies.empty()) ready.push_back(node.get());
  }
  while (!ready.empty()) {
    std::swap(ready[random_below(ready.size())], ready.back());
    const Node* node = ready.back();
    ready.pop_back();
    run_node(*node);
    for (auto* next : after[node])
      if (!--open[next]) ready.push_back(next);
  }
}

const char* type_name(CUgraphNodeType type) {
  switch (type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: return "KERNEL";
    case CU_GRAPH_NODE_TYPE_MEMCPY: return "MEMCPY";
    case CU_GRAPH_NODE_TYPE_MEMSET: return "MEMSET";
    case CU_GRAPH_NODE_TYPE_HOST: return "HOST";
    case CU_GRAPH_NODE_TYPE_GRAPH: return "GRAPH";
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD: return "EVENT_RECORD";
    default: return "EMPTY";
  }
}

// The list of CUDA's calls that fill an array: with no array, only its length is told.
template <class From, class To>
cudaError_t fill(const std::vector<From>& from, To* to, size_t* count) {
  if (to) {
    std::transform(from.begin(), from.begin() + std::min(*count, from.size()), to,
                   [](const From& each) { return (To)&*each; });
  }
  *count = from.size();
  return cudaSuccess;
}

}  // namespace

Node* Graph::add(Node node) {
  node.id = nodes.size();
  nodes.push_back(std::make_shared<Node>(std::move(node)));
  return nodes.back().get();
}

void run_graph(const Graph& graph) {
  if (is_asynchronous()) return run_in_random_order(graph);
  for (auto& node : graph.nodes) run_node(*node);
}
void hold(const std::shared_ptr<Graph>& graph) { held_graphs()[graph.get()] = graph; }
std::shared_ptr<Graph> find_graph(cudaGraph_t handle) {
  auto found = held_graphs().find((Graph*)handle);
  return found == held_graphs().end() ? nullptr : found->second;
}

}  // namespace emulator

using namespace emulator;

API cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t* out, size_t* count) {
  Lock lock(state_mutex());
  auto graph = find_graph(handle);
  RETURN(graph ? fill(graph->nodes, out, count) : cudaErrorInvalidValue);
}
API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t* out, cudaGraphEdgeData*,
                                             size_t* count) {
  Lock lock(state_mutex());
  RETURN(fill(((Node*)node)->dependencies, out, count));
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t handle, unsigned long long) {
  Lock lock(state_mutex());
  auto graph = find_graph(handle);
  if (!graph) RETURN(cudaErrorInvalidValue);
  *out = (cudaGraphExec_t) new Instance{std::make_shared<Graph>(*graph)};  // nodes are shared and never change
  RETURN(cudaSuccess);
}
API cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
  Lock lock(state_mutex());
  RETURN(held_graphs().erase((Graph*)handle) ? cudaSuccess : cudaErrorInvalidValue);
}
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t instance) {
  delete (Instance*)instance;
  return cudaSuccess;
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t instance, cudaStream_t stream) {
  auto graph = ((Instance*)instance)->graph;
  Node node{CU_GRAPH_NODE_TYPE_GRAPH, "graph", nullptr, {}, graph};
  {
    Lock lock(state_mutex());
    Stream* found = find_stream(stream);
    if (found && !found->capture) node.run = [graph] { run_graph(*graph); };  // in a capture it is a child graph
  }
  RETURN(submit(stream, std::move(node)));
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
API CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType* type) {
  *type = ((Node*)node)->type;
  return CUDA_SUCCESS;
}
#undef cuGraphKernelNodeGetParams
API CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS* parameters) {
  auto* node = (Node*)handle;
  if (node->type != CU_GRAPH_NODE_TYPE_KERNEL) return CUDA_ERROR_INVALID_VALUE;
  *parameters = {};
  parameters->func = (CUfunction)node->name.c_str();
  parameters->gridDimX = node->grid.x;
  parameters->gridDimY = node->grid.y;
  parameters->gridDimZ = node->grid.z;
  parameters->blockDimX = node->block.x;
  parameters->blockDimY = node->block.y;
  parameters->blockDimZ = node->block.z;
  return CUDA_SUCCESS;
}
API CUresult cuFuncGetName(const char** name, CUfunction function) {
  *name = (const char*)function;
  return CUDA_SUCCESS;
}
API CUresult cuKernelGetName(const char** name, CUkernel kernel) {
  *name = (const char*)kernel;
  return CUDA_SUCCESS;
}
API CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph* graph) {
  Lock lock(state_mutex());
  const auto& child = ((Node*)node)->child;
  hold(child);
  *graph = (CUgraph)child.get();
  return CUDA_SUCCESS;
}
