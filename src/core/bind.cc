#include "core/bind.h"

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/linear.h"
#include "core/text.h"

namespace ehc {

namespace {

std::string shape_text(const int64_t* shape, int rank) {
  std::string out = "[";
  for (int i = 0; i < rank; ++i) {
    if (i > 0) out += ',';
    out += std::to_string(shape[i]);
  }
  return out + "]";
}

std::string types_text(DTypeSet set) {
  std::string out;
  for (int i = 1; i < kDTypeCount; ++i) {
    if (!contains(set, static_cast<DType>(i))) continue;
    if (!out.empty()) out += '/';
    out += name_of(static_cast<DType>(i));
  }
  return out;
}

// Limits of ranges: whole ones in full, "2147483647".
std::string limit_text(double x) {
  const bool whole = x == std::floor(x) && std::fabs(x) < 1e15;
  return whole ? std::to_string(static_cast<int64_t>(x)) : number_text(x);
}

constexpr uint32_t kRelated = [] {
  uint32_t set = 0;
  for (const Relation& r : kRelations) set |= 1U << r.result;
  return set;
}();

}  // namespace

FrontDoor::FrontDoor(const Schema& schema, const Arguments& args)
    : schema_(schema), args_(args), params_(args.params) {
  look_up_tensors(const_cast<void*>(args.params));
  for (size_t i = 0; i < schema.attributes.size(); ++i) {
    const AttributeType type = schema.attributes[i].type;
    if (type != AttributeType::boolean && type != AttributeType::choice) continue;
    const AttributeValue value = attribute_value(schema, args, i);
    settings_[i] = value.present ? value.integer : -1;
  }
}

void FrontDoor::look_up_tensors(void* params) {
  size_t i = 0;
  for (const TensorSpec& spec : schema_.tensors) {
    if (spec.is_list) {
      const std::span<const Tensor> list = spec.access_list(params);
      tensors_[i] = const_cast<Tensor*>(list.data());
      list_sizes_[i] = list.size();
      present_ |= TensorSet{!list.empty()} << i;
    } else {
      tensors_[i] = &spec.access(params);
      present_ |= TensorSet{tensors_[i]->present()} << i;
    }
    ++i;
  }
}

std::string FrontDoor::name_of(Place place) const {
  return schema_.tensors[place.index].name_of(place.element);
}

void FrontDoor::refuse(Place place, const std::string& expected, const std::string& got) const {
  fail_tensor(schema_, name_of(place), expected, got);
}

std::string FrontDoor::description(Place place) const {
  return place.element < count(place.index) ? describe(at(place)) : "none";
}

void FrontDoor::mismatch(Place place) const {
  refuse(place, expected(schema_.tensors[place.index]), description(place));
}

bool FrontDoor::holds(const Condition& c) const {
  for (uint8_t i = 0; i < c.count; ++i) {
    const ConditionTerm& term = c.any[i];
    if (term.call_only && args_.call_values == nullptr) continue;
    const bool value = term.kind == ConditionTerm::tensor ? is_present(term.index)
                                                          : settings_[term.index] == term.value;
    if (value != term.negated) return true;
  }
  return c.count == 0;
}

bool FrontDoor::is_open(const Condition& c) const {
  bool call_only = false;
  for (uint8_t i = 0; i < c.count; ++i) call_only = call_only || c.any[i].call_only;
  return call_only && args_.call_values == nullptr;
}

const Shape& FrontDoor::shape_of(const TensorSpec& spec) const {
  return spec.second_shape.rank > 0 && holds(spec.second_condition) ? spec.second_shape
                                                                    : spec.shape;
}

DTypeSet FrontDoor::allowed_types(const TensorSpec& spec) const {
  if (spec.dtype_rule == DTypeRule::activation && bound_.activation != DType::none) {
    return set_of(bound_.activation);
  }
  if (spec.dtype_rule == DTypeRule::given) {
    if (!spec.dtype_source_is_attribute) return set_of(tensors_[spec.dtype_source_index]->dtype);
    if (args_.call_values != nullptr) {
      const AttributeSpec& a = schema_.attributes[spec.dtype_source_index];
      const auto value = attribute_value(schema_, args_, spec.dtype_source_index);
      const std::string_view choice = choice_name(a.choices, value.integer);
      if (const auto type = dtype_from_name(choice)) return set_of(*type);
      return set_of(tensors_[static_cast<size_t>(schema_.tensor_index(choice, false))]->dtype);
    }
  }
  return spec.dtypes;
}

// "F32[33,4,n]": numbers where known, names where not.
std::string FrontDoor::expected(const TensorSpec& spec) const {
  std::string out = types_text(allowed_types(spec)) + "[";
  const Shape& shape = shape_of(spec);
  for (uint8_t k = 0; k < shape.rank; ++k) {
    if (shape.dims[k].optional_axis && bound_.optional_axis == 0) continue;
    if (k > 0) out += ',';
    if (k == 0 && shape.leads_with_tokens() && bound_.lead_rank > 1) {
      const std::string lead = shape_text(bound_.lead, bound_.lead_rank);
      out += lead.substr(1, lead.size() - 2);
      continue;
    }
    const Linear v = evaluate(shape.dims[k], bound_.symbols);
    if (v.solvable && v.unknown < 0) {
      out += std::to_string(v.value);
    } else {
      std::string_view text = spec.pattern.substr(spec.pattern.find('[') + 1);
      for (uint8_t skip = 0; skip < k; ++skip) text = text.substr(text.find(',') + 1);
      out += text.substr(0, text.find_first_of(",]"));
    }
  }
  return out + "]";
}

// Texts are made on failure only.
void FrontDoor::check_attribute(const AttributeSpec& a, const AttributeValue& v) const {
  if (!v.present) {
    if (a.call_only && args_.call_values == nullptr) return;
    const bool has_default = !a.computed.empty();
    const bool needed = a.required.count == 0 || holds(a.required) != a.required_unless;
    if (has_default || !needed) return;
    std::string when;
    if (a.required.count > 0) {
      when = std::string(a.required_unless ? " without '" : " with '") +
             std::string(a.required_text) + "'";
    }
    fail_attribute(schema_, a.name, "a value" + when, "none");
  }
  if (a.type == AttributeType::choice && (v.integer < 0 || v.integer >= a.choice_count)) {
    fail_attribute(schema_, a.name, "one of " + std::string(a.choices),
                   "position " + std::to_string(v.integer));
  }
  if (!a.has_range) return;
  const auto in_range = [&](double x) {
    return std::isfinite(x) && (a.least_is_open ? x > a.least : x >= a.least) && x <= a.most;
  };
  const auto refuse = [&](const std::string& got) {
    const std::string range = std::isinf(a.most)
                                  ? (a.least_is_open ? "> " : ">= ") + limit_text(a.least)
                                  : "in [" + limit_text(a.least) + "," + limit_text(a.most) + "]";
    const char* finite = a.type == AttributeType::real ? "a finite number " : "";
    fail_attribute(schema_, a.name, finite + range, got);
  };
  if (a.type == AttributeType::real) {
    if (!in_range(v.real)) refuse(number_text(v.real));
  } else if (a.type == AttributeType::integers) {
    for (const int64_t x : v.integers) {
      if (!in_range(static_cast<double>(x))) refuse(std::to_string(x));
    }
  } else if (!in_range(static_cast<double>(v.integer))) {
    refuse(std::to_string(v.integer));
  }
}

void FrontDoor::bind_attribute(const AttributeSpec& a, const AttributeValue& v) {
  if (a.binds.count == 0 || !v.present) return;
  const bool list = a.type == AttributeType::integers;
  const int64_t value = list ? static_cast<int64_t>(v.integers.size()) : v.integer;
  const Linear l = evaluate(a.binds, bound_.symbols);
  int64_t solved = 0;
  const SymbolInfo& info = kSymbols[l.unknown >= 0 ? l.unknown : 0];
  const bool fits = l.unknown < 0
                        ? l.solvable && l.value == value
                        : solve(l, value, solved) && solved >= info.least && solved <= info.most;
  if (!fits) {
    fail_attribute(schema_, a.name,
                   std::string(list ? "a list of length " : "") + std::string(a.binds_text) +
                       (l.unknown < 0 ? " = " + std::to_string(l.value) : " in its range"),
                   std::to_string(value));
  }
  if (l.unknown >= 0) bound_.symbols.set(static_cast<Symbol>(l.unknown), solved);
}

void FrontDoor::check_groups(bool outputs) const {
  for (const GroupSpec& g : schema_.groups) {
    if (g.of_outputs != outputs) continue;
    const TensorSet first = present_ & g.first_set;
    const TensorSet second = present_ & g.second_set;
    const bool all_or_none = g.kind == GroupSpec::all_or_none;
    if (all_or_none
            ? first == 0 || first == g.first_set
            : (first == g.first_set && second == 0) || (first == 0 && second == g.second_set)) {
      continue;
    }
    std::string names;
    for (size_t i = 0; i < schema_.tensors.size(); ++i) {
      if (((first | second) >> i & 1U) == 0) continue;
      names += (names.empty() ? "'" : ", '") + std::string(schema_.tensors[i].name) + "'";
    }
    fail(schema_, "tensor '" + std::string(schema_.tensors[g.first[0]].name) + "': expected " +
                      (all_or_none ? "all or none of '" : "either side of '") +
                      std::string(g.text) + "', got " + (names.empty() ? "none" : names));
  }
}

void FrontDoor::set_symbol(Place place, Symbol s, int64_t value) {
  const SymbolInfo& info = kSymbols[s];
  if (value < info.least || value > info.most) {
    const std::string range = info.most == kUnlimited ? " >= " + std::to_string(info.least)
                                                      : " in [" + std::to_string(info.least) + "," +
                                                            std::to_string(info.most) + "]";
    refuse(place, std::string(info.name) + range, description(place));
  }
  bound_.symbols.set(s, value);
  apply_relations();
}

void FrontDoor::apply_relations() {
  if ((schema_.symbols & kRelated & ~bound_.symbols.bound) == 0) return;
  for (const Relation& r : kRelations) {
    const uint32_t known = bound_.symbols.bound & schema_.symbols;
    if (bound_.symbols.has(r.result) || (schema_.symbols >> r.result & 1U) == 0) continue;
    if ((known & r.needs) != r.needs) continue;
    const Linear v = evaluate(r.expression, bound_.symbols);
    if (v.solvable) bound_.symbols.set(r.result, v.value);
  }
}

inline void FrontDoor::bind_symbol(Place place, Symbol s, int64_t got) {
  if (!bound_.symbols.has(s)) {
    set_symbol(place, s, got);
  } else if (bound_.symbols.value[s] != got) {
    mismatch(place);
  }
}

// True when the dimension is settled; false when it has to wait for other symbols.
bool FrontDoor::bind_expression(Place place, const Expression& e, int64_t got, bool may_defer) {
  const Linear v = evaluate(e, bound_.symbols);
  if (v.unknown < 0) {
    if (!v.solvable || v.value != got) mismatch(place);
    return true;
  }
  int64_t solved = 0;
  if (solve(v, got, solved)) {
    set_symbol(place, static_cast<Symbol>(v.unknown), solved);
    return true;
  }
  if (!may_defer) mismatch(place);
  return false;
}

// An entry of the table: a tensor, or all of a list.
inline bool FrontDoor::bind_entry(size_t index, bool may_defer) {
  if (!is_list(index)) [[likely]]
    return bind_tensor({index}, may_defer);
  bind_list_length(index);
  bool settled = true;
  for (size_t e = 0; e < list_sizes_[index]; ++e) {
    settled = bind_tensor({index, e}, may_defer) && settled;
  }
  return settled;
}

void FrontDoor::bind_list_length(size_t index) {
  const TensorSpec& spec = schema_.tensors[index];
  const size_t got = list_sizes_[index];
  const Linear v = evaluate(spec.length, bound_.symbols);
  int64_t solved = 0;
  if (v.unknown >= 0 && solve(v, static_cast<int64_t>(got), solved)) {
    set_symbol({index}, static_cast<Symbol>(v.unknown), solved);
    return;
  }
  const size_t wanted = v.solvable && v.unknown < 0 ? static_cast<size_t>(v.value) : 0;
  if (got < wanted) mismatch({index, got});
  if (got > wanted) {
    refuse({index, wanted},
           "none ('" + std::string(spec.name) + "' has " + std::to_string(wanted) + ")",
           description({index, wanted}));
  }
}

bool FrontDoor::bind_tensor(Place place, bool may_defer) {
  const TensorSpec& spec = schema_.tensors[place.index];
  const Tensor& t = at(place);
  bool settled = true;
  if (!contains(allowed_types(spec), t.dtype)) mismatch(place);
  if (spec.dtype_rule == DTypeRule::activation) bound_.activation = t.dtype;

  const Shape& shape = shape_of(spec);
  const bool leads = shape.leads_with_tokens();
  if (t.rank < 0 || t.rank > kMaxRank) mismatch(place);
  for (int k = 0; k < t.rank; ++k) {
    if (t.shape[k] < 0) mismatch(place);
  }
  int axis = 0;  // the dimension of t that comes next
  if (leads && schema_.flattens) {
    if (bound_.lead_rank == 0) bind_leading_dimensions(place, t.rank - shape.rank + 1);
    if (t.rank != shape.rank - 1 + bound_.lead_rank) mismatch(place);
    for (; axis < bound_.lead_rank; ++axis) {
      if (t.shape[axis] != bound_.lead[axis]) mismatch(place);
    }
  }
  for (uint8_t k = axis > 0 ? 1 : 0; k < shape.rank; ++k) {
    const Expression& e = shape.dims[k];
    if (e.optional_axis) {
      const int has_axis = t.rank - axis == shape.rank - k ? 1 : 0;
      if (bound_.optional_axis < 0) bound_.optional_axis = has_axis;
      if (bound_.optional_axis != has_axis) mismatch(place);
      if (has_axis == 0) {
        bind_symbol(place, e.steps[0].value, 1);
        continue;
      }
    }
    if (axis >= t.rank) mismatch(place);
    if (e.is_symbol()) {
      bind_symbol(place, e.steps[0].value, t.shape[axis++]);
    } else if (!bind_expression(place, e, t.shape[axis++], may_defer)) {
      settled = false;
    }
  }
  if (axis != t.rank) mismatch(place);
  return settled;
}

// The first tensor that T leads says which dimensions T stands for.
void FrontDoor::bind_leading_dimensions(Place place, int lead) {
  const Tensor& t = at(place);
  if (lead < 1) mismatch(place);
  bound_.lead_rank = lead;
  int64_t tokens = 1;
  for (int k = 0; k < lead; ++k) {
    bound_.lead[k] = t.shape[k];
    if (__builtin_mul_overflow(tokens, t.shape[k], &tokens)) mismatch(place);
  }
  set_symbol(place, symbol("T"), tokens);
}

void fail(const Schema& schema, const std::string& what) {
  throw Error(ErrorKind::contract, std::string(schema.name) + ": " + what);
}
void fail_tensor(const Schema& schema, std::string_view tensor, const std::string& expected,
                 const std::string& got) {
  fail(schema, "tensor '" + std::string(tensor) + "': expected " + expected + ", got " + got);
}
void fail_attribute(const Schema& schema, std::string_view attribute, const std::string& expected,
                    const std::string& got) {
  fail(schema, "attribute '" + std::string(attribute) + "': expected " + expected + ", got " + got);
}

std::string describe(const Tensor& t) {
  if (!t.present()) return "none";
  if (t.rank < 0 || t.rank > kMaxRank) return "rank " + std::to_string(t.rank);
  return std::string(name_of(t.dtype)) + shape_text(t.shape, t.rank);
}

AttributeValue attribute_value(const Schema& schema, const Arguments& args, size_t index) {
  const AttributeSpec& a = schema.attributes[index];
  if (a.get != nullptr) return a.get(args.params);
  return args.call_values != nullptr ? args.call_values[index] : a.call_default;
}

void FrontDoor::bind_inputs(Derive derive) {
  if (const TensorSet missing = schema_.required_inputs & ~present_; missing != 0) {
    mismatch({static_cast<size_t>(std::countr_zero(missing))});
  }
  check_groups(false);
  for (size_t i = 0; i < schema_.attributes.size(); ++i) {
    const AttributeSpec& spec = schema_.attributes[i];
    if (spec.call_only && args_.call_values == nullptr) continue;
    const AttributeValue value = attribute_value(schema_, args_, i);
    check_attribute(spec, value);
    bind_attribute(spec, value);
  }
  for (const SymbolDefault& s : schema_.defaults) {
    if (!is_present(s.tensor_index)) bound_.symbols.set(s.index, s.value);
  }
  TensorSet waiting = 0;
  for (TensorSet rest = present_ & schema_.inputs; rest != 0; rest &= rest - 1) {
    if (!bind_entry(static_cast<size_t>(std::countr_zero(rest)), true)) waiting |= rest & -rest;
  }
  for (; waiting != 0; waiting &= waiting - 1) {
    bind_entry(static_cast<size_t>(std::countr_zero(waiting)), false);
  }
  apply_relations();
  if (derive != nullptr) derive(bound_, args_.params);
}

void FrontDoor::check_outputs() {
  check_groups(true);
  for (size_t i = 0; i < schema_.tensors.size(); ++i) {
    const TensorSpec& spec = schema_.tensors[i];
    if (!spec.is_output) continue;
    const bool wanted = holds(spec.condition);
    if (!is_present(i) && !spec.is_list) {
      if (wanted && !spec.is_optional) mismatch({i});
      continue;
    }
    if (!wanted && !is_open(spec.condition)) {
      refuse({i}, "no such output here (it needs " + std::string(spec.condition_text) + ")",
             description({i}));
    }
    bind_entry(i, false);
  }
}

int64_t FrontDoor::flops() const {
  int64_t sum = 0;
  for (const FlopTerm& term : schema_.flops) {
    if (!holds(term.condition)) continue;
    const Linear count = evaluate(term.count, bound_.symbols);
    if (!count.solvable || count.unknown >= 0 || __builtin_add_overflow(sum, count.value, &sum)) {
      fail(schema_, "floating-point operations: expected fewer than 2^63");
    }
  }
  return sum;
}

int64_t FrontDoor::list_length(size_t index) const {
  return evaluate(schema_.tensors[index].length, bound_.symbols).value;
}

Tensor FrontDoor::infer_output(size_t index) const {
  const TensorSpec& spec = schema_.tensors[index];
  Tensor t;
  if (!holds(spec.condition)) return t;
  const DTypeSet types = allowed_types(spec);
  for (int i = 1; i < kDTypeCount; ++i) {
    if (contains(types, static_cast<DType>(i))) t.dtype = static_cast<DType>(i);
  }
  const Shape& shape = shape_of(spec);
  const auto append = [&](int64_t dim) { t.shape[t.rank++] = dim; };
  for (uint8_t k = 0; k < shape.rank; ++k) {
    const Expression& e = shape.dims[k];
    if (k == 0 && shape.leads_with_tokens() && bound_.lead_rank > 0) {
      for (int lead = 0; lead < bound_.lead_rank; ++lead) append(bound_.lead[lead]);
    } else if (e.optional_axis && bound_.optional_axis <= 0) {
      continue;
    } else {
      const Linear v = evaluate(e, bound_.symbols);
      if (v.unknown >= 0 || !v.solvable || v.value < 0) {
        fail_tensor(schema_, spec.name, "inputs that fix its shape", expected(spec));
      }
      append(v.value);
    }
  }
  return Tensor(nullptr, t.dtype, t.shape, t.rank);
}

}  // namespace ehc
