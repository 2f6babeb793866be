#include "cli/check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "backends/cpu/cache.h"
#include "cli/selection.h"
#include "core/float_formats.h"
#include "core/tensor_bytes.h"
#include "ehc/error.h"

namespace ehc::cli {

namespace {

bool is_floating(DType type) {
  return type == DType::f32 || type == DType::f16 || type == DType::bf16;
}

// The axis of T, or -1.
int token_axis(const Shape& shape) {
  for (uint8_t k = 0; k < shape.rank; ++k) {
    const Expression& e = shape.dims[k];
    if (e.is_symbol() && e.steps[0].value == symbol("T")) return k;
  }
  return -1;
}

// Does a token's output depend on that token alone (no sequence or state), whatever T is? Backward
// operators do not promise it.
bool tokens_are_independent(const Schema& schema) {
  if (schema.name.ends_with("_bwd") || schema.is_batch_dependent) return false;
  bool any = false;
  for (const TensorSpec& s : schema.tensors) {
    if (s.name == "cu_seqlens" || s.name == "state") return false;
    if (!s.is_output) continue;
    const int axis = token_axis(s.shape);
    if (axis < 0) return false;
    if (axis > 0 && s.shape.dims[0].is_symbol() && s.shape.dims[0].steps[0].value == symbol("S")) {
      return false;  // the number of splits depends on T
    }
    any = true;
  }
  return any;
}

std::string first_difference(const Tensor& a, const Tensor& b) {
  const size_t size = size_of(a.dtype);
  for (int64_t i = 0; i < a.numel(); ++i) {
    const auto at = static_cast<size_t>(i) * size;
    if (std::memcmp(a.as<char>() + at, b.as<char>() + at, size) == 0) continue;
    if (!is_floating(a.dtype)) return fmt::format("first at element {}", i);
    const float x = load_float(a.data, a.dtype, i);
    const float y = load_float(b.data, b.dtype, i);
    if (std::isnan(x) && std::isnan(y)) continue;  // any NaN for NaN
    return fmt::format("first at element {}: {:.9g} and {:.9g}", i, x, y);
  }
  return {};
}

// The larger one; NaN is worst.
double worse(double a, double b) { return std::isnan(a) || a > b ? a : b; }

// Empty when all outputs have the same bits.
std::string differing_bits(const CaseInputs& inputs, const RunResult& a, const RunResult& b) {
  for (size_t i = 0; i < a.outputs.size(); ++i) {
    const std::string where = first_difference(a.outputs[i].tensor, b.outputs[i].tensor);
    if (!where.empty()) {
      return fmt::format("'{}' {}", inputs.name_of(a.outputs[i].slot), where);
    }
  }
  return {};
}

// A contiguous copy of a view, in memory that `memory` keeps.
Tensor compact(const Tensor& view, std::vector<std::vector<std::byte>>& memory) {
  std::byte* to = memory.emplace_back(bytes_of(view)).data();
  for_each_row(view, [&](size_t at, size_t into, size_t bytes) {
    std::memcpy(to + into, view.as<std::byte>() + at, bytes);
  });
  return Tensor(to, view.dtype, view.shape, view.rank);
}

struct Scale {
  double largest = 0;    // |expected|
  double f32_error = 0;  // of the plain loops in fp32
};

// Checks one operator; methods share the report and the contexts.
class Checker {
 public:
  Checker(const Operator& op, const CheckOptions& options) : op_(op), options_(options) {
    for (const Implementation& impl : op.implementations) {
      if (impl.name == "reference.f32") has_f32_ = true;
      if (impl.device != options.device) continue;
      if (!names_implementation(options.implementation, impl.name)) continue;
      CheckRow row;
      row.implementation = std::string(impl.name);
      report_.rows.push_back(row);
    }
  }

  void check_case(const CaseLine& line);
  CheckReport take() { return std::move(report_); }

 private:
  Context& context(int threads) {
    auto [found, fresh] = contexts_.try_emplace(threads);
    if (fresh) {
      found->second = options_.device == Device::cuda && threads > 0
                          ? Context::cuda(0, nullptr)
                          : Context::cpu(std::abs(threads));
    }
    return *found->second;
  }
  void check_implementation(const CaseInputs& inputs, const RunResult& reference,
                            const std::vector<Scale>& scales, CheckRow& row);
  void check_values(const CaseInputs& inputs, const RunResult& reference, const RunResult& got,
                    const std::vector<Scale>& scales, CheckRow& row);
  void check_threads(const CaseInputs& inputs, const RunResult& base, CheckRow& row);
  void check_layouts(const CaseInputs& inputs, const RunResult& base, CheckRow& row);
  void check_layout(const CaseInputs& inputs, const RunResult& base, Layout layout, CheckRow& row);
  void check_single_tokens(const CaseInputs& inputs, const RunResult& base, CheckRow& row);
  bool sound(const CaseInputs& inputs, const RunResult& result, CheckRow& row);
  void fail_row(const CaseLine& line, CheckRow& row, const std::string& what) {
    ++row.failures;
    report_.failures.push_back({line.text(), row.implementation, what});
  }

  const Operator& op_;
  CheckOptions options_;
  CheckReport report_;
  bool has_f32_ = false;
  std::map<int, std::optional<Context>> contexts_;  // by threads; negative: on the host
};

void Checker::check_case(const CaseLine& line) {
  const CaseInputs inputs(op_, line);
  RunResult reference;
  try {
    reference =
        run_case(inputs, inputs.tensors(), context(-1), {"reference", Layout::contiguous, 0xcd});
  } catch (const Error& e) {
    report_.failures.push_back({line.text(), "reference", e.what()});
    return;
  }
  // How well conditioned the case is: the error of the same loops in fp32.
  std::vector<Scale> scales(reference.outputs.size());
  RunResult plain;
  if (has_f32_) {
    plain = run_case(inputs, inputs.tensors(), context(-1),
                     {"reference.f32", Layout::contiguous, 0xcd});
  }
  for (size_t i = 0; i < scales.size(); ++i) {
    const Tensor& t = reference.outputs[i].tensor;
    if (!is_floating(t.dtype)) continue;
    scales[i].largest = default_tolerance(t).abs * 0x1p22;
    if (has_f32_ && plain.refusal.empty() && t.dtype == DType::f32) {
      scales[i].f32_error = compare(plain.outputs[i].tensor, t, {}, false).max_error;
    }
  }
  for (CheckRow& row : report_.rows) {
    try {
      check_implementation(inputs, reference, scales, row);
    } catch (const Error& e) {
      fail_row(line, row, e.what());
    }
  }
}

bool Checker::sound(const CaseInputs& inputs, const RunResult& result, CheckRow& row) {
  if (!result.damage.empty()) fail_row(inputs.line(), row, result.damage);
  return result.refusal.empty() && result.damage.empty();
}

void Checker::check_implementation(const CaseInputs& inputs, const RunResult& reference,
                                   const std::vector<Scale>& scales, CheckRow& row) {
  const PretendedCache small_call(SIZE_MAX);
  const RunResult base = run_case(inputs, inputs.tensors(), context(1),
                                  {row.implementation, Layout::contiguous, 0xcd});
  if (!base.refusal.empty()) {
    ++row.refused;
    return;
  }
  ++row.cases;
  if (!sound(inputs, base, row)) return;
  check_values(inputs, reference, base, scales, row);
  check_threads(inputs, base, row);
  check_layouts(inputs, base, row);
  check_single_tokens(inputs, base, row);
}

void Checker::check_values(const CaseInputs& inputs, const RunResult& reference,
                           const RunResult& got, const std::vector<Scale>& scales, CheckRow& row) {
  const CaseLine& line = inputs.line();
  const std::string rule = line.get("compare", has_f32_ ? "rule" : "exact");
  if (rule != "rule" && rule != "exact") {
    throw Error(ErrorKind::contract, "compare: expected rule or exact, got '" + rule + "'");
  }
  const double slack = std::max(1.0, std::strtod(line.get("slack", "1").c_str(), nullptr));
  for (size_t i = 0; i < got.outputs.size(); ++i) {
    const Tensor& want = reference.outputs[i].tensor;
    Tolerance tolerance = rule == "exact" ? Tolerance{0, 0, 1} : default_tolerance(want);
    // An ill-conditioned case (a gate near 0) costs any fp32 evaluation more than the rule allows.
    if (tolerance.abs > 0) {
      const double most = 64 * slack * tolerance.abs;
      tolerance.abs =
          std::min(most, std::max(slack * tolerance.abs, slack * 4 * scales[i].f32_error));
    }
    const std::string name = inputs.name_of(got.outputs[i].slot);
    const Comparison c = compare(got.outputs[i].tensor, want, tolerance, false);
    if (scales[i].largest > 0) {
      row.worst_error = worse(row.worst_error, c.max_error / scales[i].largest);
    } else {
      row.worst_error = worse(row.worst_error, c.max_error);
    }
    row.worst_used = worse(row.worst_used, c.used);
    row.worst_diff = worse(row.worst_diff, c.calc_diff);
    if (c.equal) continue;
    fail_row(line, row,
             c.note.empty()
                 ? fmt::format("'{}' differs from the reference: {} of {} elements beyond the "
                               "rule, max error {:.3e}, {:.3g} ulp",
                               name, c.failing, want.numel(), c.max_error, c.max_ulp)
                 : fmt::format("'{}': {}", name, c.note));
  }
}

// Another poison at the same time: an element that is never written shows as a difference. In turn
// as a large call, whose stores go past the caches, and as a small one.
void Checker::check_threads(const CaseInputs& inputs, const RunResult& base, CheckRow& row) {
  std::vector<int> counts = {2, 3, 8};
  if (options_.intensity > 1) counts = {2, 3, 4, 5, 6, 7, 8};
  if (options_.device == Device::cuda) counts = {1};
  unsigned char poison = 0x35;
  for (const int threads : counts) {
    const PretendedCache large_call(threads % 2 == 0 ? 0 : SIZE_MAX);
    const RunResult again = run_case(inputs, inputs.tensors(), context(threads),
                                     {row.implementation, Layout::contiguous, poison++});
    if (!sound(inputs, again, row)) continue;
    const std::string what = differing_bits(inputs, base, again);
    if (!what.empty()) {
      return fail_row(inputs.line(), row,
                      fmt::format("{} with other memory and {} threads", what, threads));
    }
  }
}

void Checker::check_layouts(const CaseInputs& inputs, const RunResult& base, CheckRow& row) {
  const std::string only = inputs.line().get("memory");
  bool known = only.empty();
  for (const Layout layout : kLayouts) {
    if (!only.empty() && name_of(layout) != only) continue;
    known = true;
    if (layout != Layout::contiguous) check_layout(inputs, base, layout, row);
  }
  if (!known) {
    throw Error(ErrorKind::contract,
                "memory: expected contiguous, strided, padded, misaligned or "
                "aliased, got '" +
                    only + "'");
  }
}

// As a small and as a large call.
void Checker::check_layout(const CaseInputs& inputs, const RunResult& base, Layout layout,
                           CheckRow& row) {
  CaseLine line = inputs.line();
  line.set("memory", name_of(layout));
  for (const size_t cache : {SIZE_MAX, size_t{0}}) {
    const PretendedCache call(cache);
    try {
      const RunResult other =
          run_case(inputs, inputs.tensors(), context(1), {row.implementation, layout, 0x5a});
      if (!other.refusal.empty()) return;
      std::string what = other.damage;
      if (what.empty()) what = differing_bits(inputs, base, other);
      if (!what.empty()) {
        return fail_row(line, row, fmt::format("{} in layout {}", what, name_of(layout)));
      }
    } catch (const Error& e) {
      return fail_row(line, row, e.what());
    }
  }
}

// The first, a middle and the last token, each in a call of its own.
void Checker::check_single_tokens(const CaseInputs& inputs, const RunResult& base, CheckRow& row) {
  const int64_t tokens = inputs.tokens();
  if (tokens < 2 || inputs.lead_rank() > 1 || !tokens_are_independent(op_.schema)) return;
  for (const int64_t t : {int64_t{0}, tokens / 2, tokens - 1}) {
    std::vector<Tensor> alone = inputs.tensors();
    std::vector<std::vector<std::byte>> memory;
    for (size_t i = 0; i < alone.size(); ++i) {
      const int axis = token_axis(inputs.spec_of(i).shape);
      if (!alone[i].present() || axis < 0) continue;
      alone[i] = compact(alone[i].slice(axis, t, t + 1), memory);
    }
    const RunResult single =
        run_case(inputs, alone, context(1), {row.implementation, Layout::contiguous, 0x6b});
    if (!sound(inputs, single, row)) continue;
    RunResult slice;
    for (const RunResult::Output& output : base.outputs) {
      // The table's second layout puts T elsewhere: find the axis by the shapes themselves.
      int axis = token_axis(inputs.spec_of(output.slot).shape);
      const Tensor& one = single.outputs[slice.outputs.size()].tensor;
      for (int k = 0; k < one.rank; ++k) {
        if (one.shape[k] != output.tensor.shape[k]) axis = k;
      }
      slice.outputs.push_back(
          {output.slot, compact(output.tensor.slice(axis, t, t + 1), slice.memory)});
    }
    const std::string what = differing_bits(inputs, slice, single);
    if (!what.empty()) {
      return fail_row(inputs.line(), row, fmt::format("{} when token {} is alone", what, t));
    }
  }
}

}  // namespace

CheckReport check_operator(const Operator& op, const std::vector<CaseLine>& lines,
                           const CheckOptions& options,
                           const std::function<void(size_t)>& progress) {
  Checker checker(op, options);
  size_t done = 0;
  for (const CaseLine& line : lines) {
    if (line.op == op.schema.name && line.level <= options.intensity) checker.check_case(line);
    if (line.op == op.schema.name && progress) progress(++done);
  }
  return checker.take();
}

}  // namespace ehc::cli
