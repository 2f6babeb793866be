// The inputs of a case: shapes from the operator's table, values from a counter-based generator,
// so that a case is the same data everywhere and in any order.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "cli/address_range.h"
#include "cli/case_list.h"
#include "core/dynamic_call.h"
#include "ehc/memory.h"

namespace ehc::cli {

// `integers`: floating-point tensors have an address but no memory. Enough for the checks and the
// choice of an implementation, at any size.
enum class CaseValues { all, integers };

class CaseInputs {
 public:
  // Throws Error{contract} that names the case's key, symbol or tensor at fault.
  CaseInputs(const Operator& op, const CaseLine& line, CaseValues values = CaseValues::all);

  [[nodiscard]] const Operator& op() const { return op_; }
  [[nodiscard]] bool has_all_values() const { return case_values_ == CaseValues::all; }
  [[nodiscard]] const CaseLine& line() const { return line_; }
  // By slot (see DynamicCall): contiguous host tensors, or absent ones.
  [[nodiscard]] const std::vector<Tensor>& tensors() const { return tensors_; }
  [[nodiscard]] const TensorSpec& spec_of(size_t slot) const {
    return op_.schema.tensors[slots_[slot].position];
  }
  [[nodiscard]] std::string name_of(size_t slot) const {
    return spec_of(slot).name_of(slots_[slot].element);
  }
  // An input that is no list; null when it is absent or unknown.
  [[nodiscard]] const Tensor* input(std::string_view name) const;
  // Tokens of the case, all leading dimensions multiplied.
  [[nodiscard]] int64_t tokens() const { return value_of(symbol("T")); }
  [[nodiscard]] int lead_rank() const { return static_cast<int>(lead_.size()); }
  // 0 when the case does not have the symbol.
  [[nodiscard]] int64_t value_of(Symbol s) const { return values_.has(s) ? values_.value[s] : 0; }
  // -1 when a symbol is missing or a division leaves a rest.
  [[nodiscard]] int64_t value_of(const Expression& e) const;

  // Sets the case's attributes and the lengths of its lists; inputs are the caller's to place.
  void prepare(DynamicCall& call) const;
  // The same, and the inputs themselves.
  void bind(DynamicCall& call) const;

 private:
  void read_settings();
  void choose_inputs();
  void relate_symbols();
  void number_slots();
  void set_attributes(DynamicCall& call) const;
  void make_tensor(size_t slot);
  void fill(size_t slot);
  void fill_integers(size_t slot, uint64_t seed);
  void fill_floats(size_t slot, uint64_t seed);
  void hide_masked_rows();
  [[noreturn]] void fail_case(const std::string& what) const;

  const Operator& op_;
  CaseLine line_;
  CaseValues case_values_;
  std::vector<std::pair<std::string, std::string>> attributes_;
  SymbolValues values_;
  std::vector<int64_t> lead_;  // the dimensions that T stands for
  std::vector<bool> present_;  // by position in the table
  std::vector<DType> dtypes_;  // by position; chosen by the case, or none
  struct Slot {
    size_t position;
    size_t element;
  };
  std::vector<Slot> slots_;
  std::vector<Tensor> tensors_;  // by slot
  std::vector<Buffer> memory_;
  std::vector<AddressRange> addresses_;
};

// Keys of a case that are neither symbol, attribute nor tensor; no operator may name one so.
bool is_case_word(std::string_view key);

}  // namespace ehc::cli
