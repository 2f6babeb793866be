#include <vector>

#include "backends/cuda/launch.cuh"
#include "core/cuda_graph.h"

namespace ehc::cuda_graph {

namespace {

void check_nodes(cudaGraph_t graph, size_t count) {
  std::vector<cudaGraphNode_t> nodes(count);
  cuda::check("graph", cudaGraphGetNodes(graph, nodes.data(), &count));
  for (cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    cuda::check("graph", cudaGraphNodeGetType(node, &type));
    if (type != cudaGraphNodeTypeKernel && type != cudaGraphNodeTypeMemcpy &&
        type != cudaGraphNodeTypeMemset && type != cudaGraphNodeTypeEmpty) {
      throw Error(ErrorKind::internal,
                  "graph: expected kernels, copies and fills, got a node of type " +
                      std::to_string(static_cast<int>(type)));
    }
  }
}

}  // namespace

Stream::Stream(int index) {
  const cuda::DeviceGuard guard(index);
  cudaStream_t stream = nullptr;
  cuda::check("stream", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  stream_ = std::shared_ptr<void>(stream,
                                  [](void* s) { cudaStreamDestroy(static_cast<cudaStream_t>(s)); });
}

Graph::Graph(int index, void* stream, const std::function<void()>& work)
    : index_(index), stream_(stream) {
  const cuda::DeviceGuard guard(index);
  const auto on = static_cast<cudaStream_t>(stream);
  cudaGraph_t graph = nullptr;
  cuda::check("graph", cudaStreamBeginCapture(on, cudaStreamCaptureModeThreadLocal));
  try {
    work();
  } catch (...) {
    cudaStreamEndCapture(on, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    cudaGetLastError();
    throw;
  }
  cuda::check("graph", cudaStreamEndCapture(on, &graph));
  const std::shared_ptr<void> captured(
      graph, [](void* g) { cudaGraphDestroy(static_cast<cudaGraph_t>(g)); });
  size_t count = 0;
  cuda::check("graph", cudaGraphGetNodes(graph, nullptr, &count));
  check_nodes(graph, count);
  if (count == 0) return;
  cudaGraphExec_t runnable = nullptr;
  cuda::check("graph", cudaGraphInstantiate(&runnable, graph, 0));
  runnable_ = std::shared_ptr<void>(
      runnable, [](void* r) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(r)); });
}

void Graph::launch() const {
  if (runnable_ == nullptr) return;
  const cuda::DeviceGuard guard(index_);
  cuda::check("graph", cudaGraphLaunch(static_cast<cudaGraphExec_t>(runnable_.get()),
                                       static_cast<cudaStream_t>(stream_)));
}

}  // namespace ehc::cuda_graph
