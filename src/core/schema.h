// One table per operator: names, dtypes, shapes and attributes of its parameter struct. Checks,
// `ehc op`, the C ABI, Python, fuzzing and the docs all read it; nothing repeats it.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "core/shape_expression.h"
#include "ehc/dtype.h"
#include "ehc/tensor.h"

namespace ehc {

// --- dtypes ------------------------------------------------------------------------------------

using DTypeSet = uint16_t;  // bit i: static_cast<DType>(i)
constexpr DTypeSet set_of(DType type) {
  return static_cast<DTypeSet>(1U << static_cast<unsigned>(type));
}
constexpr bool contains(DTypeSet set, DType type) {
  return static_cast<int>(type) < kDTypeCount && (set & set_of(type)) != 0;
}

inline constexpr DTypeSet kActivationTypes =
    set_of(DType::f32) | set_of(DType::f16) | set_of(DType::bf16);
inline constexpr DTypeSet kWeightTypes = set_of(DType::f32) | set_of(DType::bf16);

// --- attributes --------------------------------------------------------------------------------

enum class AttributeType : uint8_t { integer, real, boolean, choice, integers };

struct AttributeValue {
  bool present = false;
  int64_t integer = 0;  // also boolean (0, 1) and choice (position)
  double real = 0;
  std::span<const int64_t> integers{};
};

// --- conditions ---------------------------------------------------------------------------------

// "save|mode=stats", "!kv", "conv_weight": alternatives of one term each. A term names a tensor
// (present?), a boolean attribute (true?) or a choice (attribute=value).
struct ConditionTerm {
  enum Kind : uint8_t { tensor, attribute };
  Kind kind = tensor;
  uint8_t index = 0;
  uint8_t value = 1;
  bool negated = false;
  bool call_only = false;  // an attribute that only calls by name have
};
struct Condition {
  std::array<ConditionTerm, 3> any{};
  uint8_t count = 0;  // 0: always
};

using TensorSet = uint64_t;  // bit i: tensor i of the table

// --- specifications ------------------------------------------------------------------------------

enum class DTypeRule : uint8_t {
  fixed,       // one of a list
  activation,  // A: one type per call
  given,       // X: decided by an attribute or copied from a tensor (`dtype_source`)
};

struct TensorSpec {
  std::string_view name;     // of a list: "pre.L", its tensors are "pre.0", "pre.1", ...
  std::string_view pattern;  // as written, e.g. "A[T,n,d]"
  Shape shape{};
  DTypeSet dtypes = 0;
  DTypeRule dtype_rule = DTypeRule::fixed;
  bool is_output = false;
  bool is_optional = false;
  bool is_packed = false;         // must be contiguous
  bool is_exact = false;          // class E: the same bits from every implementation in fp32
  bool is_list = false;           // any number of tensors of one shape
  Expression length{};            // of a list
  std::string_view dtype_source;  // for DTypeRule::given
  std::string_view condition_text;
  std::string_view alias;         // input that an output may be, pointer for pointer
  std::string_view other_layout;  // "attribute=value": the shape `second_shape` applies
  Shape second_shape{};
  Condition condition{};
  Condition second_condition{};
  int8_t alias_index = -1;
  bool dtype_source_is_attribute = false;
  uint8_t dtype_source_index = 0;
  Tensor& (*access)(void* params) = nullptr;  // null for a list
  std::span<const Tensor>& (*access_list)(void* params) = nullptr;

  constexpr TensorSpec optional() const {
    TensorSpec copy = *this;
    copy.is_optional = true;
    return copy;
  }
  // The tensor must be contiguous: parameters and small tables.
  constexpr TensorSpec packed() const {
    TensorSpec copy = *this;
    copy.is_packed = true;
    return copy;
  }
  // Class E: no implementation may have other bits than `reference.f32`.
  constexpr TensorSpec exact() const {
    TensorSpec copy = *this;
    copy.is_exact = true;
    return copy;
  }
  constexpr TensorSpec may_alias(std::string_view input) const {
    TensorSpec copy = *this;
    copy.alias = input;
    return copy;
  }
  // The number of tensors in a list.
  constexpr TensorSpec counts(std::string_view expression_text) const {
    TensorSpec copy = *this;
    copy.length = parse::expression(expression_text);
    return copy;
  }
  // What output X is added to is the input X_acc.
  [[nodiscard]] constexpr bool is_target() const { return !is_output && name.ends_with("_acc"); }
  // "pre." of "pre.L".
  [[nodiscard]] constexpr std::string_view stem() const { return name.substr(0, name.size() - 1); }
  // Of a tensor: its name; of a list: the name of a tensor in it.
  [[nodiscard]] std::string name_of(size_t element) const {
    return is_list ? std::string(stem()) + std::to_string(element) : std::string(name);
  }
  // Which tensor of the list a name means: 3 for "pre.3"; else -1.
  [[nodiscard]] constexpr int64_t element_of(std::string_view tensor_name) const {
    if (!is_list || tensor_name.substr(0, stem().size()) != stem()) return -1;
    const std::string_view digits = tensor_name.substr(stem().size());
    if (digits.empty() || digits.size() > 4 || (digits.size() > 1 && digits[0] == '0')) return -1;
    int64_t element = 0;
    for (const char c : digits) {
      if (!parse::is_digit(c)) return -1;
      element = element * 10 + (c - '0');
    }
    return element;
  }
  // The dtype X comes from this attribute (a choice of dtype or tensor names) or tensor.
  constexpr TensorSpec dtype_from(std::string_view source) const {
    TensorSpec copy = *this;
    copy.dtype_source = source;
    return copy;
  }
  // The dtype is that of this input, whatever the list of the pattern allows.
  constexpr TensorSpec typed_like(std::string_view input) const {
    TensorSpec copy = dtype_from(input);
    copy.dtype_rule = DTypeRule::given;
    return copy;
  }
  // Another layout of the same output under "attribute=value".
  constexpr TensorSpec or_shape(std::string_view when, std::string_view pattern_text) const {
    TensorSpec copy = *this;
    copy.other_layout = when;
    copy.second_shape = parse::shape(pattern_text);
    return copy;
  }
};

struct AttributeSpec {
  std::string_view name;
  AttributeType type = AttributeType::integer;
  std::string_view choices;  // "add/value/stats"
  int64_t choice_count = 0;
  std::string_view required_text;  // condition under which a value is required
  std::string_view computed;       // text of a computed default, e.g. "sqrt(hd)"
  std::string_view binds_text;     // expression that the value (or the list's length) fixes
  double least = -std::numeric_limits<double>::infinity();
  double most = std::numeric_limits<double>::infinity();
  bool least_is_open = false;  // least < value instead of least <= value
  bool has_range = false;
  bool required_unless = false;  // required_text is a "without"
  // A call-only attribute has no member: it tells `ehc op` and the C ABI which outputs to make,
  // which the C++ caller says by the tensors themselves.
  bool call_only = false;
  AttributeValue call_default{};
  Condition required{};
  Expression binds{};
  AttributeValue (*get)(const void* params) = nullptr;
  void (*set)(void* params, const AttributeValue& value) = nullptr;

  constexpr AttributeSpec positive() const { return at(0, kInfinity, true); }
  constexpr AttributeSpec at_least(double low) const { return at(low, kInfinity, false); }
  constexpr AttributeSpec between(double low, double high) const { return at(low, high, false); }
  constexpr AttributeSpec required_with(std::string_view input) const {
    AttributeSpec copy = *this;
    copy.required_text = input;
    return copy;
  }
  constexpr AttributeSpec required_without(std::string_view input) const {
    AttributeSpec copy = *this;
    copy.required_text = input;
    copy.required_unless = true;
    return copy;
  }
  constexpr AttributeSpec computed_default(std::string_view text) const {
    AttributeSpec copy = *this;
    copy.computed = text;
    return copy;
  }
  // The value (for a list: its length) equals this expression.
  constexpr AttributeSpec fixes(std::string_view expression_text) const {
    AttributeSpec copy = *this;
    copy.binds_text = expression_text;
    copy.binds = parse::expression(expression_text);
    return copy;
  }

 private:
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr AttributeSpec at(double low, double high, bool open) const {
    AttributeSpec copy = *this;
    copy.least = low;
    copy.most = high;
    copy.least_is_open = open;
    copy.has_range = true;
    return copy;
  }
};

// "kv | key value": exactly one side is present, whole. "dot alpha ?": all or none.
struct GroupSpec {
  enum Kind : uint8_t { one_of, all_or_none };
  Kind kind = one_of;
  std::string_view text;
  std::array<uint8_t, 8> first{};
  std::array<uint8_t, 8> second{};
  uint8_t first_count = 0;
  uint8_t second_count = 0;
  TensorSet first_set = 0;  // the same as sets
  TensorSet second_set = 0;
  bool of_outputs = false;
};

// A symbol that has a fixed value while a tensor is absent (one sequence without cu_seqlens).
struct SymbolDefault {
  std::string_view symbol_name;
  int64_t value = 1;
  std::string_view unless_tensor;
  Symbol index = 0;
  uint8_t tensor_index = 0;
};

// What a call moves beside its tensors: bytes of passes over its workspace.
struct WorkspaceTraffic {
  Expression bytes;
};

// Floating-point operations that a call needs, of which a term counts while its condition holds: a
// sum, product, quotient, root, exponential or sigmoid is one, integers and copies are none.
struct FlopTerm {
  Formula count;
  std::string_view condition_text;
  Condition condition{};
};

// Every output depends on rows that other blocks of a kernel hold, which shapes do not show.
struct SumsOverRows {};

// A token's bits may depend on the rest of the batch, as with a platform's matrix product.
struct BatchDependent {};

// --- the schema ----------------------------------------------------------------------------------

inline constexpr size_t kMaxTensors = 48;
static_assert(kMaxTensors <= 64);  // a TensorSet holds them
inline constexpr size_t kMaxAttributes = 16;
inline constexpr size_t kMaxGroups = 8;
inline constexpr size_t kMaxFlopTerms = 12;

// Everything known about an operator's arguments. `summary` is its line in the docs.
struct Schema {
  std::string_view name;
  std::string_view section;
  std::string_view summary;
  std::span<const TensorSpec> tensors;
  std::span<const AttributeSpec> attributes;
  std::span<const GroupSpec> groups;
  std::span<const SymbolDefault> defaults;
  uint32_t symbols = 0;  // all symbols that the table mentions
  bool flattens = true;  // leading dimensions may stand for T
  TensorSet inputs = 0;
  TensorSet required_inputs = 0;
  TensorSet lists = 0;
  Expression workspace_traffic{};  // in bytes; empty: none
  std::span<const FlopTerm> flops;
  bool sums_over_rows = false;
  bool is_batch_dependent = false;
  size_t params_size = 0;  // of the parameter struct

  // Of a list also by the name of one of its tensors.
  [[nodiscard]] int tensor_index(std::string_view tensor_name, bool output) const {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const TensorSpec& s = tensors[i];
      if (s.is_output != output) continue;
      if (s.name == tensor_name || s.element_of(tensor_name) >= 0) return static_cast<int>(i);
    }
    return -1;
  }
  [[nodiscard]] int attribute_index(std::string_view attribute_name) const {
    for (size_t i = 0; i < attributes.size(); ++i) {
      if (attributes[i].name == attribute_name) return static_cast<int>(i);
    }
    return -1;
  }
};

// The position of `value` in "a/b/c", or -1.
constexpr int choice_index(std::string_view choices, std::string_view value) {
  for (int i = 0;; ++i) {
    const size_t slash = choices.find('/');
    if (choices.substr(0, slash) == value) return i;
    if (slash == std::string_view::npos) return -1;
    choices = choices.substr(slash + 1);
  }
}

constexpr int64_t choice_count(std::string_view choices) {
  int64_t count = choices.empty() ? 0 : 1;
  for (const char c : choices) count += c == '/' ? 1 : 0;
  return count;
}

constexpr std::string_view choice_name(std::string_view choices, int64_t index) {
  for (; index > 0; --index) choices = choices.substr(choices.find('/') + 1);
  return choices.substr(0, choices.find('/'));
}

}  // namespace ehc
