// The front door: one generic check of an operator's arguments against its table.
#pragma once

#include <array>
#include <string>

#include "core/schema.h"
#include "ehc/error.h"

namespace ehc {

// What the check learned: values of the symbols and the leading dimensions that T stands for.
struct Bound {
  SymbolValues symbols;
  DType activation = DType::none;
  int optional_axis = -1;  // "G?": do the tensors of this call have it? -1: not known yet
  int lead_rank = 0;
  int64_t lead[kMaxRank] = {};

  // A symbol's name, looked up by the compiler: bound["T"].
  struct Name {
    // NOLINTNEXTLINE(google-explicit-constructor): bound["T"] is the point
    consteval Name(const char* text) : index(symbol(text)) {}
    Symbol index;
  };
  [[nodiscard]] int64_t operator[](Name name) const { return symbols.value[name.index]; }
};

// Arguments of one call as the table sees them: the parameter struct, and values of the call-only
// attributes when the call came by name (`ehc op`, C ABI). A C++ caller has none: there the
// outputs that are present say what is wanted.
struct Arguments {
  const void* params = nullptr;
  const AttributeValue* call_values = nullptr;  // by attribute position; null: a C++ call
  // Room for a second struct: where leading dimensions flatten, check_layout puts a changed copy
  // there, instead of copying every call's.
  void* flattened = nullptr;
};

// Value of attribute `index`, from the struct or the call.
AttributeValue attribute_value(const Schema& schema, const Arguments& args, size_t index);

// May set symbols that the operator computes (numbers of partials, say) once the inputs are bound.
using Derive = void (*)(Bound& bound, const void* params);

// The check of one call, step by step; each step throws Error{contract}. Looks up every argument
// once: at T = 1 the front door is a good part of what a call costs.
class FrontDoor {
 public:
  FrontDoor(const Schema& schema, const Arguments& args);
  FrontDoor(const Schema&, Arguments&&) = delete;  // it keeps the reference

  // Checks attributes and inputs, and binds the symbols.
  void bind_inputs(Derive derive);
  // Checks which outputs are there, and their types and shapes.
  void check_outputs();
  // Checks that every tensor lies on `device`, its pointer, strides and what it overlaps; flattens
  // leading dimensions in `params`.
  void check_layout(Device device, int device_index);

  [[nodiscard]] const Bound& bound() const { return bound_; }
  // The struct to run on; after check_layout.
  [[nodiscard]] const void* params() const { return params_; }
  // Shape and dtype of output `index` (of a list: of each of its tensors), once inputs are bound;
  // dtype none when it is not made.
  [[nodiscard]] Tensor infer_output(size_t index) const;
  // Floating-point operations of the call by the table, once inputs are bound.
  [[nodiscard]] int64_t flops() const;
  // How many tensors list `index` has, once inputs are bound.
  [[nodiscard]] int64_t list_length(size_t index) const;
  // The workspace [data, data + bytes) must share no byte with a tensor; after check_layout.
  void check_workspace(const void* data, size_t bytes) const;

 private:
  // Bytes [begin, end) that a tensor touches.
  struct Extent {
    uintptr_t begin;
    uintptr_t end;
  };

  // A tensor of the call: an entry of the table and, of a list, a position in it.
  struct Place {
    size_t index;
    size_t element = 0;
  };

  void look_up_tensors(void* params);
  [[nodiscard]] const Tensor& at(Place place) const { return tensors_[place.index][place.element]; }
  [[nodiscard]] bool is_list(size_t index) const { return (schema_.lists >> index & 1U) != 0; }
  // Tensors at `index`; an absent one is none in a list.
  [[nodiscard]] size_t count(size_t index) const { return is_list(index) ? list_sizes_[index] : 1; }
  [[nodiscard]] std::string name_of(Place place) const;
  [[nodiscard]] std::string description(Place place) const;
  [[nodiscard]] bool is_present(size_t tensor) const { return (present_ >> tensor & 1U) != 0; }
  [[nodiscard]] bool holds(const Condition& condition) const;
  // Does it depend on an attribute that a C++ call does not have?
  [[nodiscard]] bool is_open(const Condition& condition) const;
  [[nodiscard]] const Shape& shape_of(const TensorSpec& spec) const;
  [[nodiscard]] DTypeSet allowed_types(const TensorSpec& spec) const;
  [[nodiscard]] std::string expected(const TensorSpec& spec) const;

  void check_attribute(const AttributeSpec& spec, const AttributeValue& value) const;
  void bind_attribute(const AttributeSpec& spec, const AttributeValue& value);
  void check_groups(bool outputs) const;
  // True when all dimensions are settled; with `may_defer` some may wait for other tensors.
  bool bind_entry(size_t index, bool may_defer);
  void bind_list_length(size_t index);
  bool bind_tensor(Place place, bool may_defer);
  void bind_leading_dimensions(Place place, int lead);
  void bind_symbol(Place place, Symbol s, int64_t got);
  bool bind_expression(Place place, const Expression& e, int64_t got, bool may_defer);
  void set_symbol(Place place, Symbol s, int64_t value);
  void apply_relations();

  void check_leading_dimensions(Place place) const;
  // Returns the extent of the tensor, empty when it has no elements.
  Extent check_memory(Place place, Device device, int device_index) const;
  [[nodiscard]] Extent extent_of(Place place) const;
  void check_overlaps(TensorSet live, const Extent* extents) const;
  void check_overlap(Place output, const Extent& mine, Place other, const Extent& theirs) const;
  void refuse_shared_elements(Place output, const Extent& mine, Place other,
                              const Extent& theirs) const;

  [[noreturn]] void refuse(Place place, const std::string& expected, const std::string& got) const;
  [[noreturn]] void mismatch(Place place) const;

  const Schema& schema_;
  const Arguments& args_;
  const void* params_;
  Bound bound_;
  TensorSet present_ = 0;
  // Filled as far as the table goes. `tensors_`: the first one of a list, which is only read.
  // `settings_`: booleans and choices, -1 when there is no value.
  std::array<Tensor*, kMaxTensors> tensors_;
  std::array<size_t, kMaxTensors> list_sizes_;
  std::array<int64_t, kMaxAttributes> settings_;
};

// The view of a tensor whose first `lead` dimensions became one; they flatten to one stride. The
// front door does it for all tensors of a call but for those of lists, which lie in memory of the
// caller.
Tensor flattened(const Tensor& tensor, int lead);

// "F32[33,4,5]", or "none" when absent.
std::string describe(const Tensor& tensor);

[[noreturn]] void fail(const Schema& schema, const std::string& what);
// "<operator>: tensor '<name>': expected <expected>, got <got>"
[[noreturn]] void fail_tensor(const Schema& schema, std::string_view tensor,
                              const std::string& expected, const std::string& got);
[[noreturn]] void fail_attribute(const Schema& schema, std::string_view attribute,
                                 const std::string& expected, const std::string& got);

}  // namespace ehc
