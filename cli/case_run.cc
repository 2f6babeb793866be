#include "cli/case_run.h"

#include <cstring>

#include "cli/integers.h"
#include "core/tensor_bytes.h"
#include "ehc/error.h"

namespace ehc::cli {

namespace {

constexpr size_t kGuard = 256;  // bytes on either side of a tensor

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// The view's strides, and the elements from its first to its last.
int64_t stride_rows(Tensor& t, Layout layout, bool packed, int lead_rank) {
  int64_t step = 1;
  const bool gaps = !packed && (layout == Layout::strided || layout == Layout::padded);
  const auto line = static_cast<int64_t>(64 / size_of(t.dtype));
  for (int k = t.rank - 1; k >= 0; --k) {
    t.stride[k] = step;
    step *= t.shape[k] > 1 ? t.shape[k] : 1;
    if (!gaps || k < lead_rank) continue;  // leading dimensions flatten to one stride
    const bool row = k == t.rank - 1;
    if (layout == Layout::strided) step += row ? 3 : 5;
    if (layout == Layout::padded) step = round_up(step, line) + line;
  }
  return t.numel() == 0 ? 0 : step;
}

bool same_view_shape(const Tensor& a, const Tensor& b) {
  if (a.dtype != b.dtype || a.rank != b.rank) return false;
  for (int k = 0; k < a.rank; ++k) {
    if (a.shape[k] != b.shape[k]) return false;
  }
  return true;
}

}  // namespace

std::string_view name_of(Layout layout) {
  constexpr std::string_view kNames[] = {"contiguous", "strided", "padded", "misaligned",
                                         "aliased"};
  return kNames[static_cast<size_t>(layout)];
}

PlacedTensor::PlacedTensor(const Context& context, const Tensor& like, Layout layout, bool packed,
                           int lead_rank, unsigned char poison)
    : view_(like) {
  const size_t size = size_of(like.dtype);
  const int64_t span = stride_rows(view_, layout, packed, lead_rank);
  offset_ = kGuard + (layout == Layout::misaligned ? size : 0);
  original_.assign(offset_ + static_cast<size_t>(span) * size + kGuard, std::byte{poison});
  if (like.data != nullptr) {
    const auto* from = like.as<std::byte>();
    for_each_row(view_, [&](size_t at, size_t source, size_t bytes) {
      std::memcpy(original_.data() + offset_ + at, from + source, bytes);
    });
  }
  memory_ = Buffer(context, original_.size());
  memory_.upload(original_.data());
  view_.data = static_cast<std::byte*>(memory_.data()) + offset_;
  view_.device = context.device();
  view_.device_index = static_cast<int8_t>(context.device_index());
}

std::vector<std::byte> PlacedTensor::elements() const {
  std::vector<std::byte> all(memory_.bytes());
  memory_.download(all.data());
  std::vector<std::byte> out(bytes_of(view_));
  for_each_row(view_, [&](size_t at, size_t to, size_t bytes) {
    std::memcpy(out.data() + to, all.data() + offset_ + at, bytes);
  });
  return out;
}

bool PlacedTensor::intact(bool values) const {
  std::vector<std::byte> now(memory_.bytes());
  memory_.download(now.data());
  if (!values) {
    for_each_row(view_, [&](size_t at, size_t, size_t bytes) {
      std::memcpy(now.data() + offset_ + at, original_.data() + offset_ + at, bytes);
    });
  }
  return now == original_;
}

RunResult run_case(const CaseInputs& inputs, const std::vector<Tensor>& tensors, Context& context,
                   const RunOptions& options) {
  RunResult result;
  DynamicCall call(inputs.op());
  inputs.prepare(call);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!call.spec_of(i).is_output) call.tensor(i) = tensors[i];
  }
  const std::vector<Tensor> made = call.outputs();

  // Which output lives in which input's memory.
  std::vector<int> home(tensors.size(), -1);
  for (const auto& [output, input] : call.shared_memory()) {
    if (made[output].present()) home[output] = static_cast<int>(input);
  }
  bool aliased = false;
  for (size_t i = 0; i < tensors.size() && options.layout == Layout::aliased; ++i) {
    const int alias = call.spec_of(i).alias_index;
    if (!made[i].present() || alias < 0 || home[i] >= 0) continue;
    const size_t input = call.slot_at(static_cast<size_t>(alias));
    if (!same_view_shape(made[i], tensors[input])) continue;
    home[i] = static_cast<int>(input);
    aliased = true;
  }
  if (options.layout == Layout::aliased && !aliased) {
    result.refusal = "no output may share an input's memory";
    return result;
  }

  std::vector<PlacedTensor> placed;
  std::vector<int> at(tensors.size(), -1);  // position in `placed`
  std::vector<bool> is_written(tensors.size());
  const auto place = [&](size_t i, const Tensor& like, bool leads) {
    at[i] = static_cast<int>(placed.size());
    placed.emplace_back(context, like, options.layout, call.spec_of(i).is_packed,
                        leads ? inputs.lead_rank() : 1, options.poison);
    call.tensor(i) = placed.back().view();
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorSpec& spec = call.spec_of(i);
    const bool leads = call.schema().flattens && spec.shape.leads_with_tokens();
    if (!spec.is_output && tensors[i].present()) place(i, tensors[i], leads);
    if (!spec.is_output || !made[i].present()) continue;
    if (home[i] < 0) {
      place(i, made[i], leads);
    } else {
      at[i] = at[static_cast<size_t>(home[i])];
      call.tensor(i) = placed[static_cast<size_t>(at[i])].view();
    }
    is_written[static_cast<size_t>(at[i])] = true;
  }

  context.set_implementation(options.implementation);
  try {
    const Buffer workspace(context, call.plan(context).workspace_bytes);
    context.set_workspace(workspace.data(), workspace.bytes());
    call.run(context);
    synchronize(context);
    context.set_workspace(nullptr, 0);
  } catch (const Error& e) {
    // An operator may forbid sharing in some modes (in place with saved statistics).
    if (e.kind() != ErrorKind::unavailable && !aliased) throw;
    result.refusal = e.what();
    return result;
  }

  int64_t unique_rows = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (at[i] < 0) continue;
    const PlacedTensor& p = placed[static_cast<size_t>(at[i])];
    if (!p.intact(!is_written[static_cast<size_t>(at[i])])) {
      result.damage = "memory of '" + call.name_of(i) + "' was written that is not an output's";
    }
    if (!call.spec_of(i).is_output) continue;
    Tensor t = made[i];
    result.memory.push_back(p.elements());
    t.data = result.memory.back().data();
    cut_to_unique_rows(call.spec_of(i), t, unique_rows);
    result.outputs.push_back({i, t});
  }
  return result;
}

}  // namespace ehc::cli
