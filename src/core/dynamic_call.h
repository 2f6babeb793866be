// A call by names: what `ehc op`, the C ABI, the cases and the fuzzer share. Holds a parameter
// struct and the values of call-only attributes.
#pragma once

#include <array>
#include <cstddef>
#include <cstring>
#include <forward_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/operator.h"

namespace ehc {

// A parameter struct of a size that only the operator knows. Those of up to kInline bytes are kept
// in place, so that a call allocates nothing.
class ParameterStorage {
 public:
  explicit ParameterStorage(size_t size)
      : heap_(size > kInline ? std::make_unique<std::byte[]>(size) : nullptr) {}
  ParameterStorage(const ParameterStorage&) = delete;
  ParameterStorage& operator=(const ParameterStorage&) = delete;

  [[nodiscard]] std::byte* data() { return heap_ ? heap_.get() : inline_; }
  [[nodiscard]] const std::byte* data() const { return heap_ ? heap_.get() : inline_; }

 private:
  static constexpr size_t kInline = 4096;
  std::unique_ptr<std::byte[]> heap_;
  alignas(std::max_align_t) std::byte inline_[kInline];
};

// Tensors have two numbers. Their position is that of their entry in the table. Their slot counts
// the tensors of the call in the order of the table, those of a list one after the other; without
// lists the two are the same.
class DynamicCall {
 public:
  explicit DynamicCall(const Operator& op);
  DynamicCall(const DynamicCall&) = delete;  // the parameters point into the lists
  DynamicCall& operator=(const DynamicCall&) = delete;

  [[nodiscard]] const Operator& op() const { return op_; }
  [[nodiscard]] const Schema& schema() const { return op_.schema; }

  // Names that the table does not have and values of another type throw Error{contract}. A tensor
  // of a list ("pre.3") makes the list as long as it needs to be.
  void set_input(std::string_view name, const Tensor& tensor);
  void set_output(std::string_view name, const Tensor& tensor);
  void set_attribute(std::string_view name, int64_t value);
  void set_attribute(std::string_view name, double value);
  void set_attribute(std::string_view name, bool value);
  void set_attribute(std::string_view name, const std::vector<int64_t>& value);
  void set_choice(std::string_view name, int64_t position);
  // The command line's form: parsed by the attribute's type ("1e-6", "true", "1,14", "slot").
  void set_attribute_text(std::string_view name, std::string_view text);

  // Makes the list at a position `length` tensors long; absent ones come behind those that it has.
  void set_list_length(size_t position, size_t length);
  [[nodiscard]] size_t slots() const;
  [[nodiscard]] const TensorSpec& spec_of(size_t slot) const;
  // "pre.3"
  [[nodiscard]] std::string name_of(size_t slot) const;
  [[nodiscard]] Tensor& tensor(size_t slot) const;
  // The first slot of a position.
  [[nodiscard]] size_t slot_at(size_t position) const;
  [[nodiscard]] AttributeValue attribute(size_t index) const {
    return attribute_value(schema(), {params_.data(), call_values_.data(), nullptr}, index);
  }
  [[nodiscard]] const void* params() const { return params_.data(); }

  // Checks attributes and inputs, makes lists of outputs as long as this call needs them, and
  // returns by slot the outputs that it makes (shape and dtype, no data); all others are absent.
  std::vector<Tensor> outputs();
  // The same by position, without a change of the call; of a list what each of its tensors is.
  [[nodiscard]] std::vector<Tensor> output_types() const;
  // Floating-point operations by the table; checks attributes and inputs.
  [[nodiscard]] int64_t flops() const;
  // Pairs of slots {output, input} that must share memory because attribute `inplace` is set.
  [[nodiscard]] std::vector<std::pair<size_t, size_t>> shared_memory() const;

  // The whole front-door check of bound inputs and outputs, without running anything.
  void check(Device device, int device_index);
  void run(Context& context);
  // What `run` would choose and need.
  [[nodiscard]] Plan plan(const Context& context);

 private:
  // {position, element}
  [[nodiscard]] std::pair<size_t, size_t> place_of(size_t slot) const;
  void set_tensor(std::string_view name, const Tensor& tensor, bool output);
  const AttributeSpec& spec(std::string_view name, size_t& index) const;
  void store(size_t index, AttributeValue value);
  void check_flags() const;
  // Calls body(front door) once attributes and inputs are checked.
  template <class Body>
  void with_bound_inputs(const Body& body) const;
  // What the front door sees.
  Arguments arguments(ParameterStorage& flattened) const {
    return {params_.data(), call_values_.data(), flattened.data()};
  }
  const Operator& op_;
  ParameterStorage params_;
  std::array<AttributeValue, kMaxAttributes> call_values_{};
  std::forward_list<std::vector<int64_t>> integer_lists_;  // what integer lists point into
  std::vector<std::vector<Tensor>> tensor_lists_;  // by position; empty for a table without lists
};

}  // namespace ehc
