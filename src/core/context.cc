#include "ehc/context.h"

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "core/cuda_support.h"
#include "core/thread_pool.h"
#include "ehc/error.h"

namespace ehc {

namespace {

// EHC_VERBOSE is the one switch that lets the library write to stderr, and only when set.
Context::Log default_log() {
  const char* value = std::getenv("EHC_VERBOSE");
  if (value == nullptr || std::string_view(value) != "1") return {};
  return [](std::string_view line) {
    std::fprintf(stderr, "ehc: %.*s\n", static_cast<int>(line.size()), line.data());
  };
}

}  // namespace

Context Context::cpu(int threads) {
  if (threads < 0 || threads > 1024) {
    throw Error(ErrorKind::contract,
                "context: threads: expected 0..1024, got " + std::to_string(threads));
  }
  if (threads == 0) threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  return cpu(std::make_shared<ThreadPool>(threads));
}

Context Context::cpu(std::shared_ptr<Executor> executor) {
  if (executor == nullptr) {
    throw Error(ErrorKind::contract, "context: executor: expected a pool, got null");
  }
  if (executor->concurrency() < 1) {
    throw Error(ErrorKind::contract, "context: executor: expected a concurrency >= 1, got " +
                                         std::to_string(executor->concurrency()));
  }
  Context context;
  context.executor_ = std::move(executor);
  context.log_ = default_log();
  return context;
}

Context Context::cuda(int device_index, void* stream) {
  cuda_support::require_device(device_index);
  Context context;
  context.device_ = Device::cuda;
  context.device_index_ = device_index;
  context.stream_ = stream;
  context.executor_ = std::make_shared<ThreadPool>(1);
  context.log_ = default_log();
  return context;
}

void Context::set_workspace(void* data, size_t bytes) {
  workspace_ = data;
  workspace_bytes_ = data == nullptr ? 0 : bytes;
}

}  // namespace ehc
