// The front door: one generic check of an operator's arguments against its table.
#pragma once

#include <string>

#include "core/schema.h"
#include "ehc/error.h"

namespace ehc {

// What the check learned: values of the symbols and the leading dimensions that T stands for.
struct Bound {
  SymbolValues symbols;
  DType activation = DType::none;
  int lead_rank = 0;
  int64_t lead[kMaxRank] = {};

  [[nodiscard]] int64_t operator[](std::string_view name) const {
    return symbols.value[symbol(name)];
  }
};

// Arguments of one call as the table sees them: the parameter struct, and values of the call-only
// attributes when the call came by name (`ehc op`, C ABI). A C++ caller has none: there the
// outputs that are present say what is wanted.
struct Arguments {
  void* params = nullptr;
  const AttributeValue* call_values = nullptr;  // by attribute position; null: a C++ call
};

// Value of attribute `index`, from the struct or the call.
AttributeValue attribute_value(const Schema& schema, const Arguments& args, size_t index);

// Steps of the check, each throwing Error{contract}. `derive` may set symbols that the operator
// computes (numbers of partials, say) once the inputs are bound.
using Derive = void (*)(Bound& bound, const void* params);

// Checks attributes and inputs, and binds the symbols.
Bound bind_inputs(const Schema& schema, const Arguments& args, Derive derive);

// Checks which outputs are there, their shapes, layout, overlap, and that every tensor lies on
// `device`; flattens leading dimensions in the struct.
void check_outputs(const Schema& schema, const Arguments& args, Bound& bound);
void check_layout(const Schema& schema, const Arguments& args, const Bound& bound, Device device,
                  int device_index);

// Shape and dtype of output `index` for a call by name; dtype none when it is not made.
Tensor infer_output(const Schema& schema, const Arguments& args, const Bound& bound, size_t index);

// "F32[33,4,5]", or "none" when absent.
std::string describe(const Tensor& tensor);

[[noreturn]] void fail(const Schema& schema, const std::string& what);
// "<operator>: tensor '<name>': expected <expected>, got <got>"
[[noreturn]] void fail_tensor(const Schema& schema, std::string_view tensor,
                              const std::string& expected, const std::string& got);
[[noreturn]] void fail_attribute(const Schema& schema, std::string_view attribute,
                                 const std::string& expected, const std::string& got);

}  // namespace ehc
