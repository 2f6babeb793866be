// What the tests of the CUDA backend share: calls by name whose tensors stay on a context's device.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/case_inputs.h"
#include "cli/case_run.h"
#include "core/cuda_graph.h"
#include "core/cuda_support.h"
#include "core/registry.h"
#include "core/tensor_bytes.h"
#include "ehc/error.h"
#include "ehc/memory.h"

// Ends a test where there is no GPU; gtest counts and lists it as skipped.
#define EHC_NEEDS_DEVICE() \
  if (cuda_support::device_count() == 0) GTEST_SKIP() << "no CUDA device"

namespace ehc::test {

inline bool runs_on(const Operator& op, Device device) {
  for (const Implementation& impl : op.implementations) {
    if (impl.device == device) return true;
  }
  return false;
}

// Tests that run on the host and on a device, there on a stream of their own.
class OnEachDevice : public testing::TestWithParam<Device> {
 protected:
  Context context() {
    if (GetParam() == Device::cpu) return Context::cpu(2);
    stream_.emplace(0);
    return Context::cuda(0, stream_->get());
  }

 private:
  std::optional<cuda_graph::Stream> stream_;
};

inline std::vector<const Operator*> operators_on(Device device) {
  std::vector<const Operator*> list;
  for (const Operator* op : all_operators()) {
    if (runs_on(*op, device)) list.push_back(op);
  }
  return list;
}

// The first case of an operator in the files of `ehc check` that has no empty input.
inline cli::CaseLine first_case(const Operator& op) {
  for (const cli::CaseText& text : cli::check_case_texts()) {
    for (const cli::CaseLine& line : cli::parse_cases(text.text, std::string(text.name))) {
      if (line.op != op.schema.name) continue;
      const cli::CaseInputs inputs(op, line);
      bool empty = false;
      for (const Tensor& t : inputs.tensors()) empty = empty || (t.present() && t.numel() == 0);
      if (!empty) return line;
    }
  }
  throw Error(ErrorKind::contract, "no case of " + std::string(op.schema.name));
}

inline std::vector<std::string> bits_of(const cli::RunResult& result) {
  std::vector<std::string> all;
  for (const auto& output : result.outputs) {
    all.emplace_back(output.tensor.as<char>(), bytes_of(output.tensor));
  }
  return all;
}

inline std::string error_text(const std::function<void()>& body, ErrorKind& kind) {
  try {
    body();
  } catch (const Error& e) {
    kind = e.kind();
    return e.what();
  }
  return {};
}

using Words = std::vector<std::pair<std::string, std::string>>;

// Tensors by name on a context's device, and operators that make new ones from them.
class NamedCalls {
 public:
  explicit NamedCalls(const Context& context) : context_(context) {}

  [[nodiscard]] const Tensor& at(const std::string& name) const { return tensors_.at(name); }
  void put(const std::string& name, const Tensor& host) {
    Tensor& t = place(name, host);
    memory_.back().upload(host.data);
    (void)t;
  }
  // Runs `op` with attributes as text. Its inputs are the tensors of these names, `inputs` has
  // {input, name} where they differ; an optional input takes part when a pair names it or its group
  // needs it. Outputs get a name of `outputs`, or their own.
  void call(const std::string& op_name, const Words& attributes, const Words& inputs,
            const Words& outputs) {
    const Operator& op = *find_operator(op_name);
    DynamicCall call(op);
    for (const auto& [name, text] : attributes) call.set_attribute_text(name, text);
    for (const auto& [input, name] : inputs) call.set_input(input, at(name));
    const std::vector<Tensor> made = call.outputs();
    for (size_t i = 0; i < made.size(); ++i) {
      if (!made[i].present()) continue;
      std::string name = call.name_of(i);
      for (const auto& [output, other] : outputs) {
        if (output == name) name = other;
      }
      call.tensor(i) = place(name, made[i]);
    }
    const Buffer workspace(context_, call.plan(context_).workspace_bytes);
    context_.set_workspace(workspace.data(), workspace.bytes());
    call.run(context_);
    synchronize(context_);
    context_.set_workspace(nullptr, 0);
  }
  [[nodiscard]] std::string bits(const std::string& name) const {
    const Tensor& t = at(name);
    std::string out(bytes_of(t), '\0');
    if (!out.empty() && t.device == Device::cuda) {
      cuda_support::copy_to_host(t.device_index, context_.stream(), out.data(), t.data, out.size());
    } else if (!out.empty()) {
      std::memcpy(out.data(), t.data, out.size());
    }
    return out;
  }

 private:
  Tensor& place(const std::string& name, const Tensor& like) {
    memory_.emplace_back(context_, bytes_of(like));
    Tensor& t = tensors_[name];
    t = Tensor(memory_.back().data(), like.dtype, like.shape, like.rank, context_.device(),
               context_.device_index());
    return t;
  }
  Context context_;
  std::map<std::string, Tensor> tensors_;
  std::deque<Buffer> memory_;
};

// Calls with the inputs of a case by their names.
inline NamedCalls calls_with(const Context& context, const cli::CaseInputs& inputs) {
  NamedCalls calls(context);
  for (size_t i = 0; i < inputs.tensors().size(); ++i) {
    if (inputs.tensors()[i].present()) calls.put(inputs.name_of(i), inputs.tensors()[i]);
  }
  return calls;
}

}  // namespace ehc::test
