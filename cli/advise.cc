#include "cli/advise.h"

#include <algorithm>
#include <cmath>

#include "cli/commands.h"
#include "core/linear.h"
#include "core/tensor_bytes.h"

namespace ehc::cli {

namespace {

// Sizes of the models that the operators are made for.
constexpr std::pair<std::string_view, int64_t> kUsualSizes[] = {
    {"n", 4}, {"S", 16},       {"L", 2},      {"Nmax", 3},    {"Kh", 8}, {"w", 4},
    {"B", 1}, {"dilation", 3}, {"group", 32}, {"repeat", 20}, {"Q", 3},
};

bool has(uint32_t set, Symbol s) { return (set >> s & 1U) != 0; }

std::string list_of(uint32_t symbols) {
  std::string names;
  for (int i = 0; i < kSymbolCount; ++i) {
    if (has(symbols, static_cast<Symbol>(i))) {
      names += (names.empty() ? "" : ", ") + std::string(kSymbols[i].name);
    }
  }
  return names;
}

// Completes a line, and remembers how.
class Completion {
 public:
  Completion(const Operator& op, CaseLine& line) : schema_(op.schema), line_(line), call_(op) {}

  std::vector<std::string> run() {
    read_known();
    find_needed();
    for (const auto& [name, size] : kUsualSizes) assume(symbol_of(name), size);
    relate();
    if (values_.has(symbol("N"))) assume(symbol("M"), values_.value[symbol("N")]);
    if (values_.has(symbol("L"))) assume(symbol("Lp"), values_.value[symbol("L")]);
    require_sizes();
    complete_attributes();
    return assumed_;
  }

 private:
  static Symbol symbol_of(std::string_view name) {
    const auto* at = std::find_if(std::begin(kSymbols), std::end(kSymbols),
                                  [&](const SymbolInfo& info) { return info.name == name; });
    return static_cast<Symbol>(at - std::begin(kSymbols));
  }

  // Sizes that the line has, by their own name or that of the attribute that fixes them.
  void read_known() {
    for (int i = 0; i < kSymbolCount; ++i) know(static_cast<Symbol>(i), kSymbols[i].name);
    for (const AttributeSpec& a : schema_.attributes) {
      if (a.binds.is_symbol() && a.type == AttributeType::integer) {
        know(a.binds.steps[0].value, a.name);
      }
    }
    relate();
  }
  void know(Symbol s, std::string_view key) {
    const std::string text = line_.get(key);
    if (!text.empty() && !values_.has(s)) values_.set(s, std::atoll(text.c_str()));
  }

  // Is it one of the optional inputs that the line asks for?
  [[nodiscard]] bool is_wanted(std::string_view name) const {
    return ("," + line_.get("with") + ",").find("," + std::string(name) + ",") != std::string::npos;
  }

  // Symbols of the inputs and attributes that this call has, and those that they follow from.
  void find_needed() {
    const auto need = [&](const Expression& e) {
      for (uint8_t i = 0; i < e.count && !e.optional_axis; ++i) {
        if (e.steps[i].code == ExpressionStep::variable) needed_ |= 1U << e.steps[i].value;
      }
    };
    for (const TensorSpec& spec : schema_.tensors) {
      if (spec.is_output || (spec.is_optional && !is_wanted(spec.name))) continue;
      need(spec.length);
      for (uint8_t k = 0; k < spec.shape.rank; ++k) need(spec.shape.dims[k]);
    }
    for (const AttributeSpec& a : schema_.attributes) {
      const bool is_wanted_here =
          a.required_text.empty() || (!a.required_unless && is_wanted(a.required_text));
      if (is_wanted_here && a.type == AttributeType::integer) need(a.binds);
    }
    if (schema_.attribute_index("k") >= 0 && line_.get("k").empty()) needed_ |= 1U << symbol("K");
    if (has(needed_, symbol("M")) && !values_.has(symbol("M"))) needed_ |= 1U << symbol("N");
    for (const Relation& r : kRelations) {
      if (has(needed_, r.result) && !values_.has(r.result)) needed_ |= r.needs;
    }
  }

  void assume(Symbol s, int64_t value) {
    if (!has(needed_, s) || values_.has(s)) return;
    const std::string_view name = kSymbols[s].name;
    values_.set(s, value);
    line_.set(name, std::to_string(value));
    assumed_.push_back(std::string(name) + "=" + std::to_string(value));
  }

  void relate() {
    for (const Relation& r : kRelations) {
      const Linear v = evaluate(r.expression, values_);
      if (v.solvable && v.unknown < 0 && !values_.has(r.result)) values_.set(r.result, v.value);
    }
  }

  // Sizes that nobody can guess.
  void require_sizes() const {
    uint32_t missing = needed_ & ~values_.bound;
    for (const Relation& r : kRelations) {
      if (has(missing, r.result)) missing = (missing | r.needs) & ~(1U << r.result);
    }
    missing &= ~values_.bound;
    if (missing == 0) return;
    throw UsageError("--shape: expected values of " + list_of(missing) + " for " +
                     std::string(schema_.name) + ", got '" + line_.text() + "'");
  }

  // What has no default: the size that it fixes, a small number that no cost depends on,
  // or the first choice.
  void complete_attributes() {
    for (size_t i = 0; i < schema_.attributes.size(); ++i) {
      const AttributeSpec& a = schema_.attributes[i];
      if (!line_.get(a.name).empty() || call_.attribute(i).present || !a.computed.empty()) continue;
      if (a.type == AttributeType::integer) {
        const Symbol fixed = a.binds.is_symbol() ? a.binds.steps[0].value : symbol("K");
        const bool follows = a.binds.is_symbol() || a.name == "k";
        if (follows && !values_.has(fixed)) continue;
        const double least = std::max(a.least, 0.0);
        line_.set(a.name,
                  std::to_string(follows ? values_.value[fixed] : static_cast<int64_t>(least)));
      } else if (a.type == AttributeType::real) {
        line_.set(a.name, "1e-6");
      } else if (a.type == AttributeType::boolean) {
        line_.set(a.name, "true");
      } else if (a.type == AttributeType::choice) {
        line_.set(a.name, choice_name(a.choices, 0));
      } else {
        continue;
      }
      if (!a.binds.is_symbol()) assumed_.push_back(std::string(a.name) + "=" + line_.get(a.name));
    }
  }

  const Schema& schema_;
  CaseLine& line_;
  DynamicCall call_;
  SymbolValues values_;
  uint32_t needed_ = 0;
  std::vector<std::string> assumed_;
};

}  // namespace

Advice advise(const Operator& op, CaseLine line, const Context& context) {
  Advice advice;
  advice.assumed = Completion(op, line).run();
  advice.call = line.text();
  const CaseInputs inputs(op, line, CaseValues::integers);

  DynamicCall call(op);
  inputs.bind(call);
  const std::vector<Tensor> made = call.outputs();
  std::vector<AddressRange> addresses;
  for (size_t i = 0; i < made.size(); ++i) {
    if (!made[i].present()) continue;
    call.tensor(i) = made[i];
    call.tensor(i).data = addresses.emplace_back(bytes_of(made[i])).data();
  }
  for (const auto& [output, input] : call.shared_memory()) {
    if (made[output].present()) call.tensor(output) = call.tensor(input);
  }
  for (size_t i = 0; i < call.slots(); ++i) {
    call.tensor(i).device = context.device();
    call.tensor(i).device_index = static_cast<int8_t>(context.device_index());
  }

  advice.traffic = traffic_of(inputs, made);
  advice.flops = call.flops();
  advice.crosses_blocks = crosses_blocks(op.schema);
  if (const auto axis = batch_axis(op.schema)) {
    advice.batch_axis = kSymbols[*axis].name;
    advice.batch = inputs.value_of(*axis);
  }
  const Plan plan = call.plan(context);
  advice.implementation = plan.implementation;
  advice.workspace_bytes = plan.workspace_bytes;
  for (const Plan::Refusal& r : plan.refused)
    advice.refused.emplace_back(r.implementation, r.reason);
  return advice;
}

}  // namespace ehc::cli
