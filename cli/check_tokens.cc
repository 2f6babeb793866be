// Tokens alone and at other places: class B.
#include <fmt/format.h>

#include <cstring>

#include "cli/checker.h"
#include "core/tensor_bytes.h"
#include "ehc/error.h"

namespace ehc::cli {

namespace {

// A contiguous copy of views one after the other along `axis`, in memory that `memory` keeps.
Tensor joined(const std::vector<Tensor>& views, int axis,
              std::vector<std::vector<std::byte>>& memory) {
  Tensor whole(nullptr, views[0].dtype, views[0].shape, views[0].rank);
  whole.shape[axis] = 0;
  for (const Tensor& view : views) whole.shape[axis] += view.shape[axis];
  whole = Tensor(nullptr, whole.dtype, whole.shape, whole.rank);
  whole.data = memory.emplace_back(bytes_of(whole)).data();
  int64_t begin = 0;
  for (const Tensor& view : views) {
    std::vector<std::byte> elements(bytes_of(view));
    for_each_row(view, [&](size_t at, size_t into, size_t bytes) {
      std::memcpy(elements.data() + into, view.as<std::byte>() + at, bytes);
    });
    const Tensor place = whole.slice(axis, begin, begin + view.shape[axis]);
    for_each_row(place, [&](size_t at, size_t from, size_t bytes) {
      std::memcpy(place.as<std::byte>() + at, elements.data() + from, bytes);
    });
    begin += view.shape[axis];
  }
  return whole;
}

// Tokens [first, T) and then [0, first).
Tensor rotated(const Tensor& t, int axis, int64_t first,
               std::vector<std::vector<std::byte>>& memory) {
  return joined({t.slice(axis, first, t.shape[axis]), t.slice(axis, 0, first)}, axis, memory);
}

}  // namespace

TokenBits token_bits(const Schema& schema) {
  if (schema.name.ends_with("_bwd")) return TokenBits::neighbours;
  bool any = false;
  bool by_count = schema.is_batch_dependent;
  for (const TensorSpec& s : schema.tensors) {
    if (s.name == "cu_seqlens" || s.name == "state") return TokenBits::neighbours;
    if (!s.is_output) continue;
    const int axis = token_axis(s.shape);
    if (axis < 0) return TokenBits::neighbours;
    const Expression& first = s.shape.dims[0];
    // The number of splits depends on T.
    by_count = by_count || (axis > 0 && first.is_symbol() && first.steps[0].value == symbol("S"));
    any = true;
  }
  if (!any) return TokenBits::neighbours;
  return by_count ? TokenBits::count : TokenBits::token;
}

// The first, a middle and the last token, each in a call of its own; on a device all at two other
// places too, which is all that may be asked where bits depend on T.
void Checker::check_tokens(const CaseInputs& inputs, const RunResult& base, CheckRow& row) {
  const int64_t tokens = inputs.tokens();
  const TokenBits bits = token_bits(op_.schema);
  if (tokens < 2 || inputs.lead_rank() > 1 || bits == TokenBits::neighbours) return;
  std::vector<int> axes;
  for (const RunResult::Output& output : base.outputs) {
    axes.push_back(token_axis(inputs.spec_of(output.slot).shape));
  }
  if (bits == TokenBits::token) {
    for (const int64_t t : {int64_t{0}, tokens / 2, tokens - 1}) {
      check_token_alone(inputs, base, t, axes, row);
    }
  }
  if (options_.device != Device::cpu) check_other_places(inputs, base, axes, row);
}

void Checker::check_token_alone(const CaseInputs& inputs, const RunResult& base, int64_t token,
                                std::vector<int>& axes, CheckRow& row) {
  std::vector<Tensor> alone = inputs.tensors();
  std::vector<std::vector<std::byte>> memory;
  for (size_t i = 0; i < alone.size(); ++i) {
    const int axis = token_axis(inputs.spec_of(i).shape);
    if (!alone[i].present() || axis < 0) continue;
    alone[i] = joined({alone[i].slice(axis, token, token + 1)}, axis, memory);
  }
  const RunResult single =
      run_case(inputs, alone, context(), {row.implementation, Layout::contiguous, 0x6b});
  if (!sound(inputs, single, row)) return;
  RunResult slice;
  for (size_t i = 0; i < base.outputs.size(); ++i) {
    const RunResult::Output& output = base.outputs[i];
    // The table's second layout puts T elsewhere: find the axis by the shapes themselves.
    const Tensor& one = single.outputs[i].tensor;
    for (int k = 0; k < one.rank; ++k) {
      if (one.shape[k] != output.tensor.shape[k]) axes[i] = k;
    }
    slice.outputs.push_back({output.slot, joined({output.tensor.slice(axes[i], token, token + 1)},
                                                 axes[i], slice.memory)});
  }
  const std::string what = differing_bits(inputs, slice, single);
  if (!what.empty()) {
    fail_row(inputs.line(), row, fmt::format("{} when token {} is alone", what, token));
  }
}

void Checker::check_other_places(const CaseInputs& inputs, const RunResult& base,
                                 const std::vector<int>& axes, CheckRow& row) {
  for (const int64_t first : {int64_t{1}, (inputs.tokens() + 1) / 2}) {
    std::vector<Tensor> moved = inputs.tensors();
    std::vector<std::vector<std::byte>> memory;
    for (size_t i = 0; i < moved.size(); ++i) {
      const int axis = token_axis(inputs.spec_of(i).shape);
      if (moved[i].present() && axis >= 0) moved[i] = rotated(moved[i], axis, first, memory);
    }
    const RunResult other =
        run_case(inputs, moved, context(), {row.implementation, Layout::contiguous, 0x71});
    if (!sound(inputs, other, row)) continue;
    RunResult expected;
    for (size_t i = 0; i < base.outputs.size(); ++i) {
      expected.outputs.push_back(
          {base.outputs[i].slot, rotated(base.outputs[i].tensor, axes[i], first, expected.memory)});
    }
    const std::string what = differing_bits(inputs, expected, other);
    if (!what.empty()) {
      return fail_row(inputs.line(), row, fmt::format("{} when token {} comes first", what, first));
    }
  }
}

}  // namespace ehc::cli
