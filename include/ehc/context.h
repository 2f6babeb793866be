// Context: where an operator runs. A CPU context is a set of threads, a CUDA context a stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc {

// A thread pool of the caller's. `run(count, body)` calls body(0) ... body(count - 1), each once,
// in any order and on any threads, and returns when none of them runs any more. No bit of any
// result depends on it. count <= 0: no call.
//
// Exceptions. The bodies of the library's operators throw nothing. An executor that is used for
// other work too should, like the library's own pool, run the rest or leave it out, wait for what
// has begun, and rethrow the first exception of a body from `run`. What `run` itself throws leaves
// the operator's call as it is (the one exception to "only ehc::Error", see error.h; the C ABI
// gives EHC_INTERNAL): outputs are then undefined, inputs unchanged, and context and executor
// usable.
class EHC_API Executor {
 public:
  virtual ~Executor() = default;
  [[nodiscard]] virtual int concurrency() const = 0;  // >= 1; always the same
  virtual void run(int64_t count, const std::function<void(int64_t)>& body) = 0;
};

// Not thread-safe: one context per calling thread. Cheap to copy (copies share threads).
class EHC_API Context {
 public:
  // Own persistent pool; threads = 0 takes the number of usable cores, 1 runs on the caller.
  static Context cpu(int threads = 0);
  // The caller's threads. Throws Error{contract} for a null pointer or a concurrency below 1.
  static Context cpu(std::shared_ptr<Executor> executor);
  // Work is enqueued on `stream` (a cudaStream_t; null is the legacy default stream).
  // Throws Error{unavailable} when the build has no CUDA or the device is not there.
  static Context cuda(int device_index, void* stream);

  [[nodiscard]] Device device() const { return device_; }
  [[nodiscard]] int device_index() const { return device_index_; }
  [[nodiscard]] void* stream() const { return stream_; }
  [[nodiscard]] Executor& executor() const { return *executor_; }

  // Scratch memory on the context's device, which operators use and never grow; it stays the
  // caller's. A call that needs more than there is throws Error{contract} and says how much; so
  // does one whose tensors overlap the part that it uses. Contents before and after a call mean
  // nothing, so calls on one stream can share it.
  //
  // `workspace_bytes(context, params)` beside each operator returns what its call needs, in bytes
  // and for any alignment of `data`: 0 for most. It checks `params` like the operator, throws the
  // same errors (but none about the workspace), and runs and writes nothing. The answer is a pure
  // function of shapes, types, strides, the context's device, number of threads and
  // implementation, and the processor: ask once for calls that agree in these.
  void set_workspace(void* data, size_t bytes);
  [[nodiscard]] void* workspace() const { return workspace_; }
  [[nodiscard]] size_t workspace_bytes() const { return workspace_bytes_; }

  // Restricts the choice of implementation, e.g. "reference", "cpu.avx2", or a family "cpu" where
  // no implementation has that very name; empty lets the library choose. An implementation that
  // refuses is then an error with its reason.
  void set_implementation(std::string_view name) { implementation_ = name; }
  [[nodiscard]] const std::string& implementation() const { return implementation_; }

  // Receives one line per call: the implementation chosen and why earlier ones refused.
  // The environment variable EHC_VERBOSE=1 installs one that writes to stderr.
  using Log = std::function<void(std::string_view line)>;
  void set_log(Log log) { log_ = std::move(log); }
  [[nodiscard]] const Log& log() const { return log_; }

 private:
  Context() = default;
  Device device_ = Device::cpu;
  int device_index_ = 0;
  void* stream_ = nullptr;
  std::shared_ptr<Executor> executor_;
  void* workspace_ = nullptr;
  size_t workspace_bytes_ = 0;
  std::string implementation_;
  Log log_;
};

}  // namespace ehc
