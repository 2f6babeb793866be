#include "cli/bench.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>

#include "cli/integers.h"
#include "core/cuda_timing.h"
#include "core/tensor_bytes.h"
#include "ehc/error.h"

namespace ehc::cli {

namespace {

constexpr double kWorkingSet = 1.25e9;  // bytes: several times the largest last-level cache
constexpr int kMostCopies = 64;

int64_t count_rows(const Tensor& indices) {
  int64_t rows = 0;
  for (int64_t i = 0; i < indices.numel(); ++i) rows += integer_at(indices, i) >= 0 ? 1 : 0;
  return rows;
}

// The optimizer's step works on an update in its workspace: written once, read once by each of
// `repeat` rounds and by the last pass.
double bytes_of_update(const CaseInputs& inputs) {
  const Schema& schema = inputs.op().schema;
  if (schema.name != "engram.optimizer_step") return 0;
  DynamicCall call(inputs.op());
  inputs.prepare(call);
  const auto repeat = static_cast<size_t>(schema.attribute_index("repeat"));
  const auto elements = static_cast<double>(inputs.input("weight")->numel());
  return 4 * elements * static_cast<double>(2 + call.attribute(repeat).integer);
}

double seconds_of(const Context& context, const std::function<void()>& work) {
  if (context.device() == Device::cuda) {
    return cuda_timing::time_on_stream(context.device_index(), context.stream(), work);
  }
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

double bytes_moved(const CaseInputs& inputs, const std::vector<Tensor>& outputs) {
  const Tensor* addresses = inputs.input("ids");
  if (addresses == nullptr) addresses = inputs.input("indices");
  double bytes = bytes_of_update(inputs);
  for (size_t i = 0; i < outputs.size(); ++i) {
    const TensorSpec& spec = inputs.spec_of(i);
    const Tensor& t = spec.is_output ? outputs[i] : inputs.tensors()[i];
    if (!t.present()) continue;
    const Expression first = spec.shape.rank > 0 ? spec.shape.dims[0] : Expression{};
    const bool is_table = first.is_symbol() && (first.steps[0].value == symbol("rows") ||
                                                first.steps[0].value == symbol("V"));
    const bool is_target = spec.name.ends_with("_acc");
    if (!spec.is_output && is_table && !is_target && addresses != nullptr) {
      const size_t row_bytes = t.shape[0] > 0 ? bytes_of(t) / static_cast<size_t>(t.shape[0]) : 0;
      bytes += static_cast<double>(row_bytes) * static_cast<double>(count_rows(*addresses));
    } else {
      bytes += static_cast<double>(bytes_of(t));
    }
  }
  return bytes;
}

BenchCase::BenchCase(const CaseInputs& inputs, const Context& context) : context_(context) {
  const auto copies = [&] {
    if (inputs.line().get("resident") == "true") return 1;
    const double fit = kWorkingSet / std::max(1.0, bytes_);
    return std::clamp(static_cast<int>(fit) + 1, 1, kMostCopies);
  };
  size_t workspace = 0;
  for (int copy = 0; copy == 0 || copy < copies(); ++copy) {
    DynamicCall& call = calls_.emplace_back(inputs.op());
    inputs.prepare(call);
    for (size_t i = 0; i < call.slots(); ++i) {
      if (!call.spec_of(i).is_output) call.tensor(i) = inputs.tensors()[i];
    }
    const std::vector<Tensor> made = call.outputs();
    const auto place = [&](size_t i, const Tensor& like, const void* data) {
      memory_.emplace_back(context_, bytes_of(like));
      if (data != nullptr) {
        memory_.back().upload(data);
      } else if (context_.device() == Device::cpu && memory_.back().bytes() > 0) {
        std::memset(memory_.back().data(), 1, memory_.back().bytes());  // its pages exist
      }
      Tensor& t = call.tensor(i);
      t = like;
      t.data = memory_.back().data();
      t.device = context_.device();
      t.device_index = static_cast<int8_t>(context_.device_index());
    };
    for (size_t i = 0; i < call.slots(); ++i) {
      const Tensor& input = inputs.tensors()[i];
      if (!call.spec_of(i).is_output && input.present()) place(i, input, input.data);
      if (call.spec_of(i).is_output && made[i].present()) place(i, made[i], nullptr);
    }
    for (const auto& [output, input] : call.shared_memory()) {
      if (made[output].present()) call.tensor(output) = call.tensor(input);
    }
    if (copy == 0) {
      bytes_ = bytes_moved(inputs, made);
      const Bound bound = call.check(context_.device(), context_.device_index());
      if (inputs.op().flops != nullptr) flops_ = inputs.op().flops(bound);
      context_.set_implementation({});
      workspace = call.plan(context_).workspace_bytes;
    }
  }
  workspace_ = Buffer(context_, workspace);
  context_.set_workspace(workspace_.data(), workspace_.bytes());
}

Timing BenchCase::time(const std::string& implementation, double seconds) {
  Timing timing;
  context_.set_implementation(implementation);
  try {
    const Plan plan = calls_.front().plan(context_);
    timing.implementation = plan.implementation;
    if (plan.workspace_bytes > workspace_.bytes()) {
      workspace_ = Buffer(context_, plan.workspace_bytes);
    }
    context_.set_workspace(workspace_.data(), workspace_.bytes());
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::unavailable) throw;
    return timing;
  }

  // The first run warms up, unless it took all the time there is.
  std::vector<double> times;
  double total = 0;
  for (size_t next = 0; times.empty() || total < seconds; next = (next + 1) % calls_.size()) {
    const double taken = seconds_of(context_, [&] { calls_[next].run(context_); });
    total += taken;
    times.push_back(taken);
  }
  if (times.size() > 2) times.erase(times.begin());
  std::sort(times.begin(), times.end());
  timing.best = times.front();
  timing.median = times[times.size() / 2];
  timing.repeats = static_cast<int64_t>(times.size());
  return timing;
}

CallCost time_call(const CaseInputs& inputs, Context& context) {
  const Operator& op = inputs.op();
  DynamicCall call(op);
  inputs.prepare(call);
  for (size_t i = 0; i < call.slots(); ++i) {
    if (!call.spec_of(i).is_output) call.tensor(i) = inputs.tensors()[i];
  }
  std::vector<Buffer> memory;
  const std::vector<Tensor> made = call.outputs();
  for (size_t i = 0; i < made.size(); ++i) {
    if (!made[i].present()) continue;
    memory.emplace_back(context, bytes_of(made[i]));
    call.tensor(i) = made[i];
    call.tensor(i).data = memory.back().data();
  }
  std::vector<std::byte> flattened(op.schema.params_size);
  const Arguments args{call.params(), nullptr, flattened.data()};
  const auto nanoseconds = [&](const auto& body) {
    constexpr int kBatch = 2000;
    double best = 1e30;
    for (int batch = 0; batch < 25; ++batch) {
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < kBatch; ++i) body();
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
      best = std::min(best, taken.count() / kBatch * 1e9);
    }
    return best;
  };
  CallCost cost;
  cost.check = nanoseconds([&] { check_call(op, args, context.device(), context.device_index()); });
  cost.call = nanoseconds([&] { invoke(op, context, args); });
  return cost;
}

}  // namespace ehc::cli
