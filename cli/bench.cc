#include "cli/bench.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "cli/case_run.h"
#include "cli/cost.h"
#include "core/cuda_timing.h"
#include "core/tensor_bytes.h"
#include "ehc/error.h"

namespace ehc::cli {

namespace {

// Bytes, several times the largest last-level cache.
constexpr double kWorkingSet = 1.25e9;
constexpr double kDeviceWorkingSet = 4e8;
constexpr int kMostCopies = 64;

}  // namespace

BenchCase::BenchCase(const CaseInputs& inputs, const Context& context) : context_(context) {
  const auto copies = [&] {
    if (inputs.line().get("resident") == "true") return 1;
    const bool on_device = context_.device() == Device::cuda;
    const double fit = (on_device ? kDeviceWorkingSet : kWorkingSet) / std::max(1.0, bytes_);
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
      bytes_ = traffic_of(inputs, made).total();
      flops_ = static_cast<double>(call.flops());
      context_.set_implementation({});
      workspace = call.plan(context_).workspace_bytes;
    }
  }
  workspace_ = Buffer(context_, workspace);
  context_.set_workspace(workspace_.data(), workspace_.bytes());
}

// The first run warms up, unless it took all the time there is.
std::vector<double> BenchCase::time_runs(double seconds) {
  std::vector<double> times;
  double total = 0;
  for (size_t next = 0; times.empty() || total < seconds; next = (next + 1) % calls_.size()) {
    const auto start = std::chrono::steady_clock::now();
    calls_[next].run(context_);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    total += taken.count();
    times.push_back(taken.count());
  }
  if (times.size() > 2) times.erase(times.begin());
  return times;
}

// A graph has the same number of calls of every copy, ten or more in all.
std::vector<double> BenchCase::time_replays(double seconds) {
  const auto copies = static_cast<int64_t>(calls_.size());
  return cuda_timing::time_graph(
      context_.device_index(), context_.stream(), (9 + copies) / copies * copies, seconds,
      [&](int64_t i) { calls_[static_cast<size_t>(i % copies)].run(context_); });
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

  const bool on_device = context_.device() == Device::cuda;
  std::vector<double> times = on_device ? time_replays(seconds) : time_runs(seconds);
  std::sort(times.begin(), times.end());
  timing.best = times.front();
  timing.median = times[times.size() / 2];
  timing.rated = on_device ? timing.median : timing.best;
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

FirstCall time_first_call(const CaseInputs& inputs, Device device) {
  const auto seconds = [](const auto& body) {
    const auto start = std::chrono::steady_clock::now();
    body();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  Context context = Context::cpu(1);
  FirstCall times;
  times.start = seconds([&] {
    if (device == Device::cuda) context = Context::cuda(0, nullptr);
    Buffer some(context, 64);
    const std::byte zeros[64] = {};
    some.upload(zeros);
  });
  PlacedCase call(inputs, inputs.tensors(), context, {});
  if (!call.refusal().empty()) throw Error(ErrorKind::unavailable, call.refusal());
  times.first = seconds([&] { call.run(); });
  times.second = seconds([&] { call.run(); });
  return times;
}

}  // namespace ehc::cli
