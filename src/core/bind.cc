#include "core/bind.h"

#include <cmath>
#include <cstdint>

#include "core/linear.h"

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

// One call's check; the steps are methods because they share the schema and the symbols.
class Binder {
 public:
  Binder(const Schema& schema, const Arguments& args, Bound& bound)
      : schema_(schema), args_(args), bound_(bound) {}

  Tensor& tensor(size_t i) const { return schema_.tensors[i].access(args_.params); }

  bool holds(const ConditionTerm& term) const {
    bool value = false;
    if (term.kind == ConditionTerm::tensor) {
      value = tensor(term.index).present();
    } else {
      const AttributeValue v = attribute_value(schema_, args_, term.index);
      value = v.present && v.integer == term.value;
    }
    return value != term.negated;
  }
  // Does it depend on an attribute that a C++ call does not have?
  bool open(const ConditionTerm& term) const {
    return args_.call_values == nullptr && term.kind == ConditionTerm::attribute &&
           schema_.attributes[term.index].call_only;
  }
  bool holds(const Condition& c) const {
    for (uint8_t i = 0; i < c.count; ++i) {
      if (!open(c.any[i]) && holds(c.any[i])) return true;
    }
    return c.count == 0;
  }
  bool open(const Condition& c) const {
    for (uint8_t i = 0; i < c.count; ++i) {
      if (open(c.any[i])) return true;
    }
    return false;
  }

  const Shape& shape_of(const TensorSpec& spec) const {
    return spec.second_shape.rank > 0 && holds(spec.second_condition) ? spec.second_shape
                                                                      : spec.shape;
  }

  void check_attribute(size_t index) const;
  void check_groups(bool outputs) const;
  // True when all dimensions are settled; with `may_defer` some may wait for other tensors.
  bool bind_tensor(size_t index, bool may_defer);
  bool bind_dim(size_t index, const Expression& e, int64_t got, bool may_defer);
  void set_symbol(size_t index, Symbol s, int64_t value);
  void check_ranges() const;
  void apply_relations();
  DTypeSet allowed_types(const TensorSpec& spec) const;
  std::string expected(const TensorSpec& spec) const;

  [[noreturn]] void mismatch(size_t index) const {
    const TensorSpec& spec = schema_.tensors[index];
    fail_tensor(schema_, spec.name, expected(spec), describe(tensor(index)));
  }

 private:
  const Schema& schema_;
  const Arguments& args_;
  Bound& bound_;
};

DTypeSet Binder::allowed_types(const TensorSpec& spec) const {
  if (spec.dtype_rule == DTypeRule::activation && bound_.activation != DType::none) {
    return set_of(bound_.activation);
  }
  if (spec.dtype_rule == DTypeRule::given) {
    if (!spec.dtype_source_is_attribute) return set_of(tensor(spec.dtype_source_index).dtype);
    if (args_.call_values != nullptr) {
      const AttributeSpec& a = schema_.attributes[spec.dtype_source_index];
      const auto value = attribute_value(schema_, args_, spec.dtype_source_index);
      const std::string_view choice = choice_name(a.choices, value.integer);
      if (const auto type = dtype_from_name(choice)) return set_of(*type);
      return set_of(tensor(static_cast<size_t>(schema_.tensor_index(choice, false))).dtype);
    }
  }
  return spec.dtypes;
}

// "F32[33,4,n]": numbers where known, names where not.
std::string Binder::expected(const TensorSpec& spec) const {
  std::string out = types_text(allowed_types(spec)) + "[";
  const Shape& shape = shape_of(spec);
  for (uint8_t k = 0; k < shape.rank; ++k) {
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

void Binder::check_attribute(size_t index) const {
  const AttributeSpec& a = schema_.attributes[index];
  const AttributeValue v = attribute_value(schema_, args_, index);
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
  if (!a.has_range) return;
  const auto in_range = [&](double x) {
    return std::isfinite(x) && (a.least_is_open ? x > a.least : x >= a.least) && x <= a.most;
  };
  const auto number = [](double x) {
    std::string text = std::to_string(x);
    if (x == std::floor(x) && std::fabs(x) < 1e15) text = std::to_string(static_cast<int64_t>(x));
    return text;
  };
  const auto refuse = [&](const std::string& got) {
    const std::string range = std::isinf(a.most)
                                  ? (a.least_is_open ? "> " : ">= ") + number(a.least)
                                  : "in [" + number(a.least) + "," + number(a.most) + "]";
    const char* finite = a.type == AttributeType::real ? "a finite number " : "";
    fail_attribute(schema_, a.name, finite + range, got);
  };
  if (a.type == AttributeType::real) {
    if (!in_range(v.real)) refuse(std::isfinite(v.real) ? number(v.real) : std::to_string(v.real));
  } else if (a.type == AttributeType::integers) {
    for (const int64_t x : v.integers) {
      if (!in_range(static_cast<double>(x))) refuse(std::to_string(x));
    }
  } else if (!in_range(static_cast<double>(v.integer))) {
    refuse(std::to_string(v.integer));
  }
}

void Binder::check_groups(bool outputs) const {
  for (const GroupSpec& g : schema_.groups) {
    if (schema_.tensors[g.first[0]].is_output != outputs) continue;
    const auto count = [&](const auto& list, uint8_t size) {
      int present = 0;
      for (uint8_t i = 0; i < size; ++i) present += tensor(list[i]).present() ? 1 : 0;
      return present;
    };
    const int first = count(g.first, g.first_count);
    const int second = count(g.second, g.second_count);
    const auto listed = [&] {
      std::string names;
      for (const auto& [list, size] :
           {std::pair{g.first, g.first_count}, {g.second, g.second_count}})
        for (uint8_t i = 0; i < size; ++i)
          if (tensor(list[i]).present())
            names +=
                (names.empty() ? "'" : ", '") + std::string(schema_.tensors[list[i]].name) + "'";
      return names.empty() ? std::string("none") : names;
    };
    const auto quoted = [&] {
      return "tensor '" + std::string(schema_.tensors[g.first[0]].name) + "': expected ";
    };
    if (g.kind == GroupSpec::all_or_none) {
      if (first != 0 && first != g.first_count) {
        fail(schema_, quoted() + "all or none of '" + std::string(g.text) + "', got " + listed());
      }
    } else if (!((first == g.first_count && second == 0) ||
                 (first == 0 && second == g.second_count))) {
      fail(schema_, quoted() + "either side of '" + std::string(g.text) + "', got " + listed());
    }
  }
}

void Binder::set_symbol(size_t index, Symbol s, int64_t value) {
  const SymbolInfo& info = kSymbols[s];
  if (value < info.least || value > info.most) {
    const std::string range = info.most == kUnlimited ? " >= " + std::to_string(info.least)
                                                      : " in [" + std::to_string(info.least) + "," +
                                                            std::to_string(info.most) + "]";
    fail_tensor(schema_, schema_.tensors[index].name, std::string(info.name) + range,
                describe(tensor(index)));
  }
  bound_.symbols.set(s, value);
  apply_relations();
}

void Binder::apply_relations() {
  for (const Relation& r : relations()) {
    const uint32_t known = bound_.symbols.bound & schema_.symbols;
    if (bound_.symbols.has(r.result) || (schema_.symbols >> r.result & 1U) == 0) continue;
    if ((known & r.needs) != r.needs) continue;
    const Linear v = evaluate(r.expression, bound_.symbols);
    if (v.solvable) bound_.symbols.set(r.result, v.value);
  }
}

// True when the dimension is settled; false when it has to wait for other symbols.
bool Binder::bind_dim(size_t index, const Expression& e, int64_t got, bool may_defer) {
  if (e.is_symbol()) {
    const Symbol s = e.steps[0].value;
    if (!bound_.symbols.has(s)) {
      set_symbol(index, s, got);
    } else if (bound_.symbols.value[s] != got) {
      mismatch(index);
    }
    return true;
  }
  const Linear v = evaluate(e, bound_.symbols);
  if (v.unknown < 0) {
    if (!v.solvable || v.value != got) mismatch(index);
    return true;
  }
  int64_t solved = 0;
  if (solve(v, got, solved)) {
    set_symbol(index, static_cast<Symbol>(v.unknown), solved);
    return true;
  }
  if (!may_defer) mismatch(index);
  return false;
}

bool Binder::bind_tensor(size_t index, bool may_defer) {
  const TensorSpec& spec = schema_.tensors[index];
  const Tensor& t = tensor(index);
  if (!t.present()) return true;
  bool settled = true;
  if (!contains(allowed_types(spec), t.dtype)) mismatch(index);
  if (spec.dtype_rule == DTypeRule::activation) bound_.activation = t.dtype;

  const Shape& shape = shape_of(spec);
  const bool leads = shape.leads_with_tokens();
  if (t.rank < 0 || t.rank > kMaxRank) mismatch(index);
  for (int k = 0; k < t.rank; ++k) {
    if (t.shape[k] < 0) mismatch(index);
  }
  int lead = leads ? 1 : 0;
  if (leads && schema_.flattens) {
    if (bound_.lead_rank == 0) {
      if (t.rank < shape.rank) mismatch(index);
      bound_.lead_rank = t.rank - shape.rank + 1;
      int64_t tokens = 1;
      for (int k = 0; k < bound_.lead_rank; ++k) {
        bound_.lead[k] = t.shape[k];
        if (__builtin_mul_overflow(tokens, t.shape[k], &tokens)) mismatch(index);
      }
      set_symbol(index, symbol("T"), tokens);
    }
    lead = bound_.lead_rank;
    if (t.rank != shape.rank - 1 + lead) mismatch(index);
    for (int k = 0; k < lead; ++k) {
      if (t.shape[k] != bound_.lead[k]) mismatch(index);
    }
  } else if (leads) {
    if (t.rank < 1) mismatch(index);
    bind_dim(index, shape.dims[0], t.shape[0], false);
  }
  int at = lead;
  for (uint8_t k = leads ? 1 : 0; k < shape.rank; ++k) {
    const Expression& e = shape.dims[k];
    if (e.optional_axis && t.rank - at == shape.rank - k - 1) {
      if (bound_.symbols.has(e.steps[0].value) && bound_.symbols.value[e.steps[0].value] != 1) {
        mismatch(index);
      }
      continue;
    }
    if (at >= t.rank) mismatch(index);
    settled = bind_dim(index, e, t.shape[at++], may_defer) && settled;
  }
  if (at != t.rank) mismatch(index);
  return settled;
}

}  // namespace

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

Bound bind_inputs(const Schema& schema, const Arguments& args, Derive derive) {
  Bound bound;
  Binder b(schema, args, bound);
  for (size_t i = 0; i < schema.tensors.size(); ++i) {
    const TensorSpec& spec = schema.tensors[i];
    if (!spec.is_output && !spec.is_optional && !b.tensor(i).present()) b.mismatch(i);
  }
  b.check_groups(false);
  for (size_t i = 0; i < schema.attributes.size(); ++i) {
    b.check_attribute(i);
    const AttributeSpec& a = schema.attributes[i];
    const AttributeValue v = attribute_value(schema, args, i);
    if (a.binds.count == 0 || !v.present) continue;
    const bool list = a.type == AttributeType::integers;
    const int64_t value = list ? static_cast<int64_t>(v.integers.size()) : v.integer;
    const Linear l = evaluate(a.binds, bound.symbols);
    int64_t solved = 0;
    const SymbolInfo& info = kSymbols[l.unknown >= 0 ? l.unknown : 0];
    const bool fits = l.unknown < 0
                          ? l.solvable && l.value == value
                          : solve(l, value, solved) && solved >= info.least && solved <= info.most;
    if (!fits) {
      fail_attribute(schema, a.name,
                     std::string(list ? "a list of length " : "") + std::string(a.binds_text) +
                         (l.unknown < 0 ? " = " + std::to_string(l.value) : " in its range"),
                     std::to_string(value));
    }
    if (l.unknown >= 0) bound.symbols.set(static_cast<Symbol>(l.unknown), solved);
  }
  for (const SymbolDefault& s : schema.defaults) {
    if (!b.tensor(s.tensor_index).present()) bound.symbols.set(s.index, s.value);
  }
  uint64_t waiting = 0;
  static_assert(kMaxTensors <= 64);
  for (size_t i = 0; i < schema.tensors.size(); ++i) {
    if (!schema.tensors[i].is_output && !b.bind_tensor(i, true)) waiting |= uint64_t{1} << i;
  }
  for (size_t i = 0; waiting >> i != 0; ++i) {
    if ((waiting >> i & 1U) != 0) b.bind_tensor(i, false);
  }
  b.apply_relations();
  if (derive != nullptr) derive(bound, args.params);
  return bound;
}

void check_outputs(const Schema& schema, const Arguments& args, Bound& bound) {
  Binder b(schema, args, bound);
  b.check_groups(true);
  for (size_t i = 0; i < schema.tensors.size(); ++i) {
    const TensorSpec& spec = schema.tensors[i];
    if (!spec.is_output) continue;
    const Tensor& t = b.tensor(i);
    const bool wanted = b.holds(spec.condition);
    if (wanted && !spec.is_optional && !t.present()) b.mismatch(i);
    if (!wanted && !b.open(spec.condition) && t.present()) {
      fail_tensor(schema, spec.name,
                  "no such output here (it needs " + std::string(spec.condition_text) + ")",
                  describe(t));
    }
    b.bind_tensor(i, false);
  }
}

Tensor infer_output(const Schema& schema, const Arguments& args, const Bound& bound, size_t index) {
  Bound copy = bound;
  Binder b(schema, args, copy);
  const TensorSpec& spec = schema.tensors[index];
  Tensor t;
  if (!b.holds(spec.condition)) return t;
  const DTypeSet types = b.allowed_types(spec);
  for (int i = 1; i < kDTypeCount; ++i) {
    if (contains(types, static_cast<DType>(i))) t.dtype = static_cast<DType>(i);
  }
  const Shape& shape = b.shape_of(spec);
  const auto append = [&](int64_t dim) { t.shape[t.rank++] = dim; };
  for (uint8_t k = 0; k < shape.rank; ++k) {
    const Expression& e = shape.dims[k];
    if (k == 0 && shape.leads_with_tokens() && bound.lead_rank > 0) {
      for (int lead = 0; lead < bound.lead_rank; ++lead) append(bound.lead[lead]);
    } else if (e.optional_axis && !bound.symbols.has(e.steps[0].value)) {
      continue;
    } else {
      const Linear v = evaluate(e, bound.symbols);
      if (v.unknown >= 0 || !v.solvable || v.value < 0) {
        fail_tensor(schema, spec.name, "inputs that fix its shape", b.expected(spec));
      }
      append(v.value);
    }
  }
  return Tensor(nullptr, t.dtype, t.shape, t.rank);
}

}  // namespace ehc
