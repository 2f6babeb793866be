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

Stream::Stream(int index) : index_(index) {
  const cuda::DeviceGuard guard(index);
  cudaStream_t stream = nullptr;
  cuda::check("stream", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  stream_ = stream;
}

Stream::~Stream() { cudaStreamDestroy(static_cast<cudaStream_t>(stream_)); }

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
  cudaError_t status = cudaSuccess;
  try {
    size_t count = 0;
    cuda::check("graph", cudaGraphGetNodes(graph, nullptr, &count));
    check_nodes(graph, count);
    cudaGraphExec_t runnable = nullptr;
    if (count > 0) status = cudaGraphInstantiate(&runnable, graph, 0);
    runnable_ = runnable;
  } catch (...) {
    cudaGraphDestroy(graph);
    throw;
  }
  cudaGraphDestroy(graph);
  cuda::check("graph", status);
}

Graph::~Graph() {
  if (runnable_ != nullptr) cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(runnable_));
}

void Graph::launch() const {
  if (runnable_ == nullptr) return;
  const cuda::DeviceGuard guard(index_);
  cuda::check("graph", cudaGraphLaunch(static_cast<cudaGraphExec_t>(runnable_),
                                       static_cast<cudaStream_t>(stream_)));
}

}  // namespace ehc::cuda_graph
