// What Python calls, as functions of a tvm-ffi module. This folder alone knows that library.
//
//   call(op, stream, workspace, tensors..., attributes...)      runs an operator
//   infer(op, tensors..., attributes...)                        types and shapes of its outputs
//   workspace_bytes(op, stream, tensors..., attributes...)      scratch memory that `call` needs
// `op` is a position of `tables()`, tensors and attributes are those of arguments.h; `stream` is
// None (the framework's current stream) or an address.
//
// Expected failures are results, not exceptions: a string "<status>:<text>".
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "arguments.h"
#include "contexts.h"
#include "failure.h"
#include "tables.h"

namespace ehc::python {

namespace {

using Values = std::span<const TVMFFIAny>;

// Implementations that the caller wants, by position of the operator.
class Forced {
 public:
  void set(int64_t op, std::string name) {
    const std::unique_lock lock(mutex_);
    names_.resize(ehc_op_count());
    names_.at(static_cast<size_t>(op)) = std::move(name);
    any_ = std::ranges::any_of(names_, [](const std::string& n) { return !n.empty(); });
  }
  std::string get(int64_t op) {
    if (!any_) return {};
    const std::shared_lock lock(mutex_);
    return names_.at(static_cast<size_t>(op));
  }

 private:
  std::atomic<bool> any_{false};
  std::shared_mutex mutex_;
  std::vector<std::string> names_;
};

Forced& forced() {
  static Forced all;
  return all;
}

int64_t integer(const TVMFFIAny& value, const char* what) {
  if (value.type_index != kTVMFFIInt)
    throw Failure(EHC_CONTRACT, std::string(what) + ": expected an integer");
  return value.v_int64;
}

const ehc_operator* operator_at(int64_t position) {
  const ehc_operator* op = ehc_op_at(static_cast<size_t>(position));
  if (op == nullptr) throw Failure(EHC_CONTRACT, ehc_last_error());
  return op;
}

Place place_of(ehc_device device, const TVMFFIAny& stream) {
  if (device.type != EHC_CUDA) return {};
  Place place{EHC_CUDA, device.id, nullptr};
  place.stream = stream.type_index == kTVMFFINone
                     ? TVMFFIEnvGetStream(device.type, device.id)
                     : reinterpret_cast<void*>(integer(stream, "stream"));
  return place;
}

// Memory of a caller's workspace; the tensor stays the caller's.
struct Memory {
  void* data = nullptr;
  size_t bytes = 0;
};

Memory memory_of(const TVMFFIAny& value, ehc_device device) {
  if (value.type_index == kTVMFFINone) return {};
  if (value.type_index != kTVMFFITensor && value.type_index != kTVMFFIDLTensorPtr) {
    throw Failure(EHC_CONTRACT, "workspace: expected a contiguous array of U8, got something else");
  }
  const DLTensor& tensor = value.type_index == kTVMFFITensor
                               ? *TVMFFITensorGetDLTensorPtr(value.v_obj)
                               : *static_cast<const DLTensor*>(value.v_ptr);
  const bool is_bytes = tensor.ndim == 1 && tensor.dtype.bits == 8 && tensor.dtype.lanes == 1 &&
                        (tensor.strides == nullptr || tensor.strides[0] == 1);
  if (!is_bytes)
    throw Failure(EHC_CONTRACT,
                  "workspace: expected U8[bytes] of unit stride, got another type or shape");
  const bool on_cuda = device.type == EHC_CUDA;
  if ((tensor.device.device_type == kDLCUDA) != on_cuda ||
      (on_cuda && tensor.device.device_id != device.id)) {
    throw Failure(EHC_CONTRACT, "workspace: expected memory of the tensors' device, got another's");
  }
  return {static_cast<char*>(tensor.data) + tensor.byte_offset,
          static_cast<size_t>(tensor.shape[0])};
}

// None, or the bytes of workspace without which a CUDA call cannot run: its memory is the
// framework's. A host call without a workspace takes the context's.
tvm::ffi::Any call(Values values) {
  const int64_t position = integer(values[0], "op");
  const ehc_operator* op = operator_at(position);
  const Arguments arguments(op, values.subspan(3));
  Lease lease(place_of(arguments.device(), values[1]), forced().get(position));
  Memory memory = memory_of(values[2], arguments.device());
  if (memory.data == nullptr && uses_workspace(position)) {
    check(ehc_workspace_bytes(lease.get(), op, arguments.get(), &memory.bytes));
    if (memory.bytes > 0) memory.data = lease.scratch(memory.bytes);
    if (memory.bytes > 0 && memory.data == nullptr) return static_cast<int64_t>(memory.bytes);
  }
  if (memory.data != nullptr)
    check(ehc_context_set_workspace(lease.get(), memory.data, memory.bytes));
  check(ehc_run(lease.get(), op, arguments.get()));
  return {};
}

// Bytes: int64 (code << 8 | bits), rank, dims..., for each tensor of the table; 0, 0 for inputs and
// for outputs that this call does not make.
tvm::ffi::Any infer(Values values) {
  const ehc_operator* op = operator_at(integer(values[0], "op"));
  const Arguments arguments(op, values.subspan(1));
  std::vector<ehc_layout> layouts(ehc_op_describe(op)->tensor_count);
  check(ehc_infer_outputs(op, arguments.get(), layouts.data(), layouts.size()));
  std::vector<int64_t> out;
  out.reserve(8 * layouts.size());
  for (const ehc_layout& layout : layouts) {
    out.push_back(layout.dtype.code << 8 | layout.dtype.bits);
    out.push_back(layout.ndim);
    out.insert(out.end(), layout.shape, layout.shape + layout.ndim);
  }
  return tvm::ffi::Bytes(reinterpret_cast<const char*>(out.data()), out.size() * sizeof(int64_t));
}

tvm::ffi::Any workspace_bytes(Values values) {
  const int64_t position = integer(values[0], "op");
  const ehc_operator* op = operator_at(position);
  const Arguments arguments(op, values.subspan(2));
  const Lease lease(place_of(arguments.device(), values[1]), forced().get(position));
  size_t bytes = 0;
  check(ehc_workspace_bytes(lease.get(), op, arguments.get(), &bytes));
  return static_cast<int64_t>(bytes);
}

using Function = tvm::ffi::Any (*)(Values);

// The calling convention of tvm-ffi around a function of ours.
int guarded(Function function, int32_t least, const TVMFFIAny* values, int32_t count,
            TVMFFIAny* result) {
  TVM_FFI_SAFE_CALL_BEGIN();
  tvm::ffi::Any& out = *reinterpret_cast<tvm::ffi::Any*>(result);
  try {
    if (count < least)
      throw Failure(EHC_CONTRACT, "arguments: expected at least " + std::to_string(least));
    out = function(Values(values, static_cast<size_t>(count)));
  } catch (const Failure& e) {
    out = tvm::ffi::String(std::to_string(e.status()) + ":" + e.what());
  }
  TVM_FFI_SAFE_CALL_END();
}

// Texts are bytes, since strings are failures.
tvm::ffi::Any bytes(const std::string& text) { return tvm::ffi::Bytes(text.data(), text.size()); }

tvm::ffi::Any set_implementation(Values values) {
  const int64_t position = integer(values[0], "op");
  operator_at(position);
  forced().set(position, text(values[1]));
  return {};
}

tvm::ffi::Any set_log_on(Values values) {
  set_log(integer(values[0], "on") != 0);
  return {};
}

tvm::ffi::Any take_log_lines(Values) { return bytes(take_log()); }

tvm::ffi::Any set_threads(Values values) {
  const int64_t count = integer(values[0], "threads");
  set_num_threads(static_cast<int32_t>(std::clamp<int64_t>(count, INT32_MIN, INT32_MAX)));
  return {};
}

tvm::ffi::Any get_threads(Values) { return num_threads(); }
tvm::ffi::Any describe(Values) { return bytes(tables_json()); }

tvm::ffi::Any json_or_failure(const char* text) {
  if (text == nullptr) throw Failure(EHC_INTERNAL, ehc_last_error());
  return bytes(text);
}
tvm::ffi::Any build_info(Values) { return json_or_failure(ehc_build_info()); }
tvm::ffi::Any device_info(Values) { return json_or_failure(ehc_device_info()); }

}  // namespace

}  // namespace ehc::python

#define EHC_EXPORT(name, function, least)                                                \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* values,     \
                                                     int32_t count, TVMFFIAny* result) { \
    return ehc::python::guarded(ehc::python::function, least, values, count, result);    \
  }

EHC_EXPORT(call, call, 3)
EHC_EXPORT(infer, infer, 1)
EHC_EXPORT(workspace_bytes, workspace_bytes, 2)
EHC_EXPORT(set_implementation, set_implementation, 2)
EHC_EXPORT(set_log, set_log_on, 1)
EHC_EXPORT(take_log, take_log_lines, 0)
EHC_EXPORT(set_num_threads, set_threads, 1)
EHC_EXPORT(num_threads, get_threads, 0)
EHC_EXPORT(tables, describe, 0)
EHC_EXPORT(build_info, build_info, 0)
EHC_EXPORT(device_info, device_info, 0)
