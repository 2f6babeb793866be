#include "cli/cost.h"

#include <algorithm>

#include "cli/integers.h"
#include "core/tensor_bytes.h"

namespace ehc::cli {

namespace {

bool mentions(const Expression& e, Symbol s) {
  return std::any_of(e.steps.begin(), e.steps.begin() + e.count, [s](const ExpressionStep& step) {
    return step.code == ExpressionStep::variable && step.value == s;
  });
}

bool has_axis(const TensorSpec& spec, Symbol s) {
  return std::any_of(spec.shape.dims.begin(), spec.shape.dims.begin() + spec.shape.rank,
                     [s](const Expression& e) { return mentions(e, s); });
}

bool is_addressed(const TensorSpec& spec) {
  if (spec.is_output || spec.is_target() || spec.shape.rank == 0) return false;
  const Expression& first = spec.shape.dims[0];
  return first.is_symbol() &&
         (first.steps[0].value == symbol("rows") || first.steps[0].value == symbol("V"));
}

int64_t count_rows(const Tensor& indices, bool have_values) {
  if (!have_values) return indices.numel();
  int64_t rows = 0;
  for (int64_t i = 0; i < indices.numel(); ++i) rows += integer_at(indices, i) >= 0 ? 1 : 0;
  return rows;
}

}  // namespace

std::optional<Symbol> batch_axis(const Schema& schema) {
  for (const Symbol s : {symbol("T"), symbol("rows"), symbol("V")}) {
    if ((schema.symbols >> s & 1U) != 0) return s;
  }
  return std::nullopt;
}

Traffic traffic_of(const CaseInputs& inputs, const std::vector<Tensor>& outputs) {
  const Schema& schema = inputs.op().schema;
  const Tensor* addresses = inputs.input("ids");
  if (addresses == nullptr) addresses = inputs.input("indices");
  const std::optional<Symbol> batch = batch_axis(schema);
  Traffic traffic;
  if (schema.workspace_traffic.count > 0) {
    traffic.workspace = static_cast<double>(inputs.value_of(schema.workspace_traffic));
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    const TensorSpec& spec = inputs.spec_of(i);
    const Tensor& t = spec.is_output ? outputs[i] : inputs.tensors()[i];
    if (!t.present()) continue;
    const auto bytes = static_cast<double>(bytes_of(t));
    if (is_addressed(spec) && addresses != nullptr) {
      const double row = t.shape[0] > 0 ? bytes / static_cast<double>(t.shape[0]) : 0;
      traffic.batch += row * static_cast<double>(count_rows(*addresses, inputs.has_all_values()));
    } else if (has_axis(spec, symbol("P"))) {
      traffic.partials += bytes;
    } else if ((batch && has_axis(spec, *batch)) || has_axis(spec, symbol("U"))) {
      traffic.batch += bytes;
    } else {
      traffic.shared += bytes;
    }
  }
  return traffic;
}

bool crosses_blocks(const Schema& schema) {
  if (schema.sums_over_rows) return true;
  const std::optional<Symbol> batch = batch_axis(schema);
  if (!batch) return false;
  constexpr DTypeSet kFloats = kActivationTypes;
  return std::any_of(schema.tensors.begin(), schema.tensors.end(), [&](const TensorSpec& spec) {
    if (!spec.is_output || (spec.dtypes & kFloats) == 0) return false;
    if (has_axis(spec, symbol("P")) || has_axis(spec, symbol("S"))) return true;
    // State belongs to a sequence, not to the batch.
    return !has_axis(spec, *batch) && !has_axis(spec, symbol("B")) && !has_axis(spec, symbol("U"));
  });
}

}  // namespace ehc::cli
