#include "cli/check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "backends/cpu/cache.h"
#include "cli/checker.h"
#include "cli/selection.h"
#include "core/float_formats.h"
#include "core/forced_grid.h"
#include "core/tensor_bytes.h"
#include "ehc/error.h"

namespace ehc::cli {

bool is_floating(DType type) {
  return type == DType::f32 || type == DType::f16 || type == DType::bf16;
}

int token_axis(const Shape& shape) {
  for (uint8_t k = 0; k < shape.rank; ++k) {
    const Expression& e = shape.dims[k];
    if (e.is_symbol() && e.steps[0].value == symbol("T")) return k;
  }
  return -1;
}

std::string first_difference(const Tensor& a, const Tensor& b) {
  const size_t size = size_of(a.dtype);
  if (a.numel() > 0 && std::memcmp(a.data, b.data, bytes_of(a)) == 0) return {};
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

std::string differing_bits(const CaseInputs& inputs, const RunResult& a, const RunResult& b) {
  for (size_t i = 0; i < a.outputs.size(); ++i) {
    const std::string where = first_difference(a.outputs[i].tensor, b.outputs[i].tensor);
    if (!where.empty()) {
      return fmt::format("'{}' {}", inputs.name_of(a.outputs[i].slot), where);
    }
  }
  return {};
}

namespace {

Layout layout_of(const CaseLine& line) {
  const std::string name = line.get("memory", "contiguous");
  const std::optional<Layout> layout = layout_from_name(name);
  if (layout) return *layout;
  throw Error(ErrorKind::contract,
              "memory: expected contiguous, strided, padded, misaligned, aliased, bare or far, "
              "got '" +
                  name + "'");
}

// The larger one; NaN is worst.
double worse(double a, double b) { return std::isnan(a) || a > b ? a : b; }

}  // namespace

Checker::Checker(const Operator& op, const CheckOptions& options) : op_(op), options_(options) {
  for (const Implementation& impl : op.implementations) {
    if (impl.name == "reference.f32") has_f32_ = true;
    if (impl.device != options.device) continue;
    if (!names_implementation(options.implementation, impl.name)) continue;
    CheckRow row;
    row.implementation = std::string(impl.name);
    report_.rows.push_back(row);
  }
  if (options.device == Device::cuda) {
    stream_.emplace(0);
    on_stream_ = Context::cuda(0, stream_->get());
  }
}

Context& Checker::host(int threads) {
  const auto found = hosts_.find(threads);
  if (found != hosts_.end()) return found->second;
  return hosts_.emplace(threads, Context::cpu(threads)).first->second;
}

Context& Checker::context(int threads) { return on_stream_ ? *on_stream_ : host(threads); }

void Checker::fail_row(const CaseLine& line, CheckRow& row, const std::string& what) {
  ++row.failures;
  report_.failures.push_back({line.text(), row.implementation, what});
}

// No bit of the references depends on threads, so they take all there are.
Expected Checker::expect(const CaseInputs& inputs) {
  Expected e;
  e.reference =
      run_case(inputs, inputs.tensors(), host(0), {"reference", Layout::contiguous, 0xcd});
  if (has_f32_) {
    e.plain =
        run_case(inputs, inputs.tensors(), host(0), {"reference.f32", Layout::contiguous, 0xcd});
  }
  // How well conditioned the case is: the error of the same loops in fp32.
  e.scales.resize(e.reference.outputs.size());
  for (size_t i = 0; i < e.scales.size(); ++i) {
    const Tensor& t = e.reference.outputs[i].tensor;
    if (!is_floating(t.dtype)) continue;
    e.scales[i].largest = default_tolerance(t).abs * 0x1p22;
    if (has_f32_ && e.plain.refusal.empty() && t.dtype == DType::f32) {
      e.scales[i].f32_error = compare(e.plain.outputs[i].tensor, t, {}, false).max_error;
    }
  }
  return e;
}

void Checker::check_case(const CaseLine& line) {
  const CaseInputs inputs(op_, line);
  Expected expected;
  try {
    expected = expect(inputs);
  } catch (const Error& e) {
    report_.failures.push_back({line.text(), "reference", e.what()});
    return;
  }
  for (CheckRow& row : report_.rows) {
    try {
      check_implementation(inputs, expected, row);
    } catch (const Error& e) {
      fail_row(line, row, e.what());
    }
  }
}

bool Checker::sound(const CaseInputs& inputs, const RunResult& result, CheckRow& row) {
  if (!result.damage.empty()) fail_row(inputs.line(), row, result.damage);
  return result.refusal.empty() && result.damage.empty();
}

// On a device the first run is captured: an implementation's first use in a process is then one
// inside a graph.
void Checker::check_implementation(const CaseInputs& inputs, const Expected& expected,
                                   CheckRow& row) {
  const PretendedCache small_call(SIZE_MAX);
  const bool on_device = options_.device != Device::cpu;
  const Layout layout = options_.once ? layout_of(inputs.line()) : Layout::contiguous;
  const ForcedGrid any_grid(0);
  const RunResult base = run_case(inputs, inputs.tensors(), context(),
                                  {row.implementation, layout, 0xcd, on_device && !options_.once});
  if (!base.refusal.empty()) {
    ++row.refused;
    return;
  }
  ++row.cases;
  if (!sound(inputs, base, row)) return;
  check_values(inputs, expected, base, row);
  if (options_.once) {
    if (any_grid.was_asked()) check_grids(inputs, base, layout, row);
    return;
  }
  if (on_device) {
    if (any_grid.was_asked()) check_grids(inputs, base, layout, row);
    check_device(inputs, base, row);
  } else {
    check_threads(inputs, base, row);
  }
  check_layouts(inputs, base, row);
  check_tokens(inputs, base, row);
  if (on_device) check_many_tokens(inputs, expected, base, row);
}

Tolerance Checker::tolerance_of(const CaseLine& line, const Expected& expected,
                                size_t output) const {
  const std::string rule = line.get("compare", has_f32_ ? "rule" : "exact");
  if (rule != "rule" && rule != "exact") {
    throw Error(ErrorKind::contract, "compare: expected rule or exact, got '" + rule + "'");
  }
  if (rule == "exact") return {0, 0, 1};
  const double slack = std::max(1.0, std::strtod(line.get("slack", "1").c_str(), nullptr));
  Tolerance tolerance = default_tolerance(expected.reference.outputs[output].tensor);
  // An ill-conditioned case (a gate near 0) costs any fp32 evaluation more than the rule allows.
  if (tolerance.abs > 0) {
    const double most = 64 * slack * tolerance.abs;
    tolerance.abs = std::min(
        most, std::max(slack * tolerance.abs, slack * 4 * expected.scales[output].f32_error));
  }
  return tolerance;
}

void Checker::check_values(const CaseInputs& inputs, const Expected& expected, const RunResult& got,
                           CheckRow& row) {
  const CaseLine& line = inputs.line();
  for (size_t i = 0; i < got.outputs.size(); ++i) {
    const Tensor& want = expected.reference.outputs[i].tensor;
    const std::string name = inputs.name_of(got.outputs[i].slot);
    const Comparison c =
        compare(got.outputs[i].tensor, want, tolerance_of(line, expected, i), false);
    const double largest = expected.scales[i].largest;
    row.worst_error = worse(row.worst_error, largest > 0 ? c.max_error / largest : c.max_error);
    row.worst_used = worse(row.worst_used, c.used);
    row.worst_diff = worse(row.worst_diff, c.calc_diff);
    if (!c.equal) {
      fail_row(line, row,
               c.note.empty()
                   ? fmt::format("'{}' differs from the reference: {} of {} elements beyond the "
                                 "rule, max error {:.3e}, {:.3g} ulp",
                                 name, c.failing, want.numel(), c.max_error, c.max_ulp)
                   : fmt::format("'{}': {}", name, c.note));
    }
    // Class E: the same bits from every implementation but the one in double.
    if (!inputs.spec_of(got.outputs[i].slot).is_exact || expected.plain.outputs.empty() ||
        row.implementation == "reference") {
      continue;
    }
    const std::string where =
        first_difference(got.outputs[i].tensor, expected.plain.outputs[i].tensor);
    if (!where.empty()) {
      fail_row(line, row, fmt::format("'{}' is exact, but {} by reference.f32", name, where));
    }
  }
}

// Another poison at the same time: an element that is never written shows as a difference. In turn
// as a large call, whose stores go past the caches, and as a small one.
void Checker::check_threads(const CaseInputs& inputs, const RunResult& base, CheckRow& row) {
  std::vector<int> counts = {2, 3, 8};
  if (options_.intensity > 1) counts = {2, 3, 4, 5, 6, 7, 8};
  unsigned char poison = 0x35;
  for (const int threads : counts) {
    const PretendedCache large_call(threads % 2 == 0 ? 0 : SIZE_MAX);
    const RunResult again = run_case(inputs, inputs.tensors(), host(threads),
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
  if (only.empty()) {
    for (const Layout layout : kLayouts) {
      if (layout != Layout::contiguous) check_layout(inputs, base, layout, row);
    }
    if (options_.device != Device::cpu) check_layout(inputs, base, Layout::bare, row);
    return;
  }
  const Layout layout = layout_of(inputs.line());
  if (layout != Layout::contiguous) check_layout(inputs, base, layout, row);
}

// As a small and as a large call, which no device tells apart.
void Checker::check_layout(const CaseInputs& inputs, const RunResult& base, Layout layout,
                           CheckRow& row) {
  CaseLine line = inputs.line();
  line.set("memory", name_of(layout));
  for (const size_t cache : {SIZE_MAX, size_t{0}}) {
    if (cache == 0 && options_.device != Device::cpu) return;
    const PretendedCache call(cache);
    try {
      const RunResult other =
          run_case(inputs, inputs.tensors(), context(), {row.implementation, layout, 0x5a});
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

bool takes_part(const CaseLine& line, const CheckOptions& options) {
  const std::string_view device = options.device == Device::cpu ? "cpu" : "cuda";
  const bool is_due =
      options.level > 0 ? line.level == options.level : line.level <= options.intensity;
  return is_due && (line.device == "any" || line.device == device);
}

CheckReport check_operator(const Operator& op, const std::vector<CaseLine>& lines,
                           const CheckOptions& options,
                           const std::function<void(size_t)>& progress) {
  Checker checker(op, options);
  size_t done = 0;
  std::vector<const CaseLine*> parts;
  for (const CaseLine& line : lines) {
    if (line.op != op.schema.name) continue;
    if (takes_part(line, options)) parts.push_back(&line);
  }
  const size_t most = options.most > 0 ? std::min(options.most, parts.size()) : parts.size();
  for (size_t i = options.slice; i < most; i += options.slices) {
    checker.check_case(*parts[i * parts.size() / most]);
    if (progress) progress(++done);
  }
  return checker.take();
}

}  // namespace ehc::cli
