// How an operator writes its table; see src/ops/engram/gate/gate.cc for one. Everything runs at
// compile time: a misspelt symbol, tensor or dtype does not compile.
#pragma once

#include <tuple>

#include "core/schema.h"

namespace ehc {

namespace build {

template <class M>
struct MemberOf;
template <class P, class V>
struct MemberOf<V P::*> {
  using Params = P;
  using Value = V;
};

// A member of the parameter struct, or of a struct in it: <&P::weights, &Weights::fn>.
template <auto First, auto... Rest>
struct Path {
  using Params = typename MemberOf<decltype(First)>::Params;
  using Value = typename Path<Rest...>::Value;
  static constexpr Value& in(Params& p) { return Path<Rest...>::in(p.*First); }
  static constexpr const Value& in(const Params& p) { return Path<Rest...>::in(p.*First); }
};
template <auto Last>
struct Path<Last> {
  using Params = typename MemberOf<decltype(Last)>::Params;
  using Value = typename MemberOf<decltype(Last)>::Value;
  static constexpr Value& in(Params& p) { return p.*Last; }
  static constexpr const Value& in(const Params& p) { return p.*Last; }
};

// "A", "W" or a list such as "BF16/F32".
constexpr DTypeSet dtype_set(std::string_view types) {
  if (types == "A") return kActivationTypes;
  if (types == "W") return kWeightTypes;
  DTypeSet set = 0;
  while (true) {
    const size_t slash = types.find('/');
    set |= set_of(dtype_from_name(types.substr(0, slash)).value());
    if (slash == std::string_view::npos) return set;
    types = types.substr(slash + 1);
  }
}

template <class Member>
constexpr TensorSpec tensor_spec(std::string_view name, std::string_view pattern) {
  using Params = typename Member::Params;
  TensorSpec s{};
  s.name = name;
  s.pattern = pattern;
  const size_t bracket = pattern.find('[');
  s.shape = parse::shape(pattern.substr(bracket));
  const std::string_view types = pattern.substr(0, bracket);
  if (types == "A") s.dtype_rule = DTypeRule::activation;
  const bool given = types.substr(0, 2) == "X:";  // "X:I32/I64"
  if (given) s.dtype_rule = DTypeRule::given;
  s.dtypes = dtype_set(given ? types.substr(2) : types);
  if constexpr (std::is_same_v<typename Member::Value, Tensor>) {
    s.access = [](void* params) -> Tensor& { return Member::in(*static_cast<Params*>(params)); };
  } else {
    s.is_list = true;
    s.access_list = [](void* params) -> std::span<const Tensor>& {
      return Member::in(*static_cast<Params*>(params));
    };
  }
  return s;
}

template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};

template <class V>
constexpr AttributeType attribute_type() {
  if constexpr (IsOptional<V>::value) {
    return attribute_type<typename V::value_type>();
  } else if constexpr (std::is_same_v<V, bool>) {
    return AttributeType::boolean;
  } else if constexpr (std::is_enum_v<V>) {
    return AttributeType::choice;
  } else if constexpr (std::is_integral_v<V>) {
    return AttributeType::integer;
  } else if constexpr (std::is_floating_point_v<V>) {
    return AttributeType::real;
  } else {
    static_assert(std::is_same_v<V, std::span<const int64_t>>);
    return AttributeType::integers;
  }
}

template <class V>
AttributeValue to_value(const V& v) {
  if constexpr (IsOptional<V>::value) {
    return v ? to_value(*v) : AttributeValue{};
  } else if constexpr (std::is_floating_point_v<V>) {
    return {.present = true, .real = v};
  } else if constexpr (std::is_same_v<V, std::span<const int64_t>>) {
    return {.present = v.data() != nullptr, .integers = v};
  } else {
    return {.present = true, .integer = static_cast<int64_t>(v)};
  }
}

template <class V>
void from_value(V& out, const AttributeValue& value) {
  if constexpr (IsOptional<V>::value) {
    typename V::value_type inner{};
    from_value(inner, value);
    out = inner;
  } else if constexpr (std::is_floating_point_v<V>) {
    out = value.real;
  } else if constexpr (std::is_same_v<V, std::span<const int64_t>>) {
    out = value.integers;
  } else {
    out = static_cast<V>(value.integer);
  }
}

}  // namespace build

// An input, e.g. in<&P::residual>("residual", "A[T,n,d]"). A member that is a span of tensors makes
// a list: in<&P::pre>("pre.L", "F32[T,n]").counts("L"). Several members are a path, see
// build::Path.
template <auto... Members>
constexpr TensorSpec in(std::string_view name, std::string_view pattern) {
  return build::tensor_spec<build::Path<Members...>>(name, pattern);
}

// An output, made when the condition holds ("" = always).
template <auto... Members>
constexpr TensorSpec out(std::string_view name, std::string_view pattern,
                         std::string_view condition = {}) {
  TensorSpec s = build::tensor_spec<build::Path<Members...>>(name, pattern);
  s.is_output = true;
  s.condition_text = condition;
  return s;
}

// An attribute; its type and default are those of the member (std::optional = no default).
template <auto... Members>
constexpr AttributeSpec attribute(std::string_view name, std::string_view choices = {}) {
  using Member = build::Path<Members...>;
  using Params = typename Member::Params;
  using Value = typename Member::Value;
  AttributeSpec s{};
  s.name = name;
  s.type = build::attribute_type<Value>();
  s.choices = choices;
  s.choice_count = choice_count(choices);
  s.get = [](const void* p) { return build::to_value(Member::in(*static_cast<const Params*>(p))); };
  s.set = [](void* p, const AttributeValue& v) {
    build::from_value(Member::in(*static_cast<Params*>(p)), v);
  };
  return s;
}

// Attributes without a member: what a C++ caller says by the tensors that it passes.
constexpr AttributeSpec call_flag(std::string_view name) {
  AttributeSpec s{};
  s.name = name;
  s.type = AttributeType::boolean;
  s.call_only = true;
  s.call_default = {.present = true, .integer = 0};
  return s;
}
constexpr AttributeSpec call_choice(std::string_view name, std::string_view choices,
                                    std::string_view default_choice) {
  AttributeSpec s{};
  s.name = name;
  s.type = AttributeType::choice;
  s.choices = choices;
  s.choice_count = choice_count(choices);
  s.call_only = true;
  s.call_default = {.present = true, .integer = choice_index(choices, default_choice)};
  return s;
}
constexpr AttributeSpec call_integer(std::string_view name) {
  AttributeSpec s{};
  s.name = name;
  s.call_only = true;
  return s;
}

constexpr GroupSpec one_of(std::string_view text) {
  GroupSpec g{};
  g.text = text;
  return g;
}
constexpr GroupSpec all_or_none(std::string_view text) {
  GroupSpec g{};
  g.kind = GroupSpec::all_or_none;
  g.text = text;
  return g;
}
constexpr SymbolDefault default_symbol(std::string_view name, int64_t value,
                                       std::string_view unless_tensor) {
  return {name, value, unless_tensor};
}

constexpr WorkspaceTraffic workspace_traffic(std::string_view bytes) {
  return {parse::expression(bytes)};
}

// flops("7*T*n*d"), flops("2*T*n*d", "mode=add"): the sum of the terms whose condition holds.
constexpr FlopTerm flops(std::string_view count, std::string_view condition = {}) {
  return {parse::expression<Formula>(count), condition};
}

// Storage of a table; `view` is what the rest of the library sees.
struct Table {
  std::string_view name;
  std::string_view section;
  std::string_view summary;
  std::array<TensorSpec, kMaxTensors> tensors{};
  std::array<AttributeSpec, kMaxAttributes> attributes{};
  std::array<GroupSpec, kMaxGroups> groups{};
  std::array<SymbolDefault, 2> defaults{};
  uint8_t tensor_count = 0;
  uint8_t attribute_count = 0;
  uint8_t group_count = 0;
  uint8_t default_count = 0;
  uint32_t symbols = 0;
  bool flattens = true;
  TensorSet inputs = 0;
  TensorSet required_inputs = 0;
  TensorSet lists = 0;
  Expression traffic{};  // of the workspace
  std::array<FlopTerm, kMaxFlopTerms> flops{};
  uint8_t flop_count = 0;
  bool sums_over_rows = false;
  bool is_batch_dependent = false;

  constexpr void add(const TensorSpec& s) { tensors[tensor_count++] = s; }
  constexpr void add(const AttributeSpec& s) { attributes[attribute_count++] = s; }
  constexpr void add(const GroupSpec& s) { groups[group_count++] = s; }
  constexpr void add(const SymbolDefault& s) { defaults[default_count++] = s; }
  constexpr void add(const WorkspaceTraffic& t) { traffic = t.bytes; }
  constexpr void add(const FlopTerm& f) { flops[flop_count++] = f; }
  constexpr void add(SumsOverRows) { sums_over_rows = true; }
  constexpr void add(BatchDependent) { is_batch_dependent = true; }
  // Several items at once, for groups of tensors that operators share.
  template <class... Items>
  constexpr void add(const std::tuple<Items...>& items) {
    std::apply([this](const auto&... item) { (this->add(item), ...); }, items);
  }

  [[nodiscard]] constexpr Schema view() const {
    return {name,
            section,
            summary,
            std::span(tensors.data(), tensor_count),
            std::span(attributes.data(), attribute_count),
            std::span(groups.data(), group_count),
            std::span(defaults.data(), default_count),
            symbols,
            flattens,
            inputs,
            required_inputs,
            lists,
            traffic,
            std::span(flops.data(), flop_count),
            sums_over_rows,
            is_batch_dependent,
            0};
  }
};

namespace build {

constexpr uint8_t find_tensor(const Table& t, std::string_view name, bool prefer_input = true) {
  for (const bool output : {!prefer_input, prefer_input}) {
    for (uint8_t i = 0; i < t.tensor_count; ++i) {
      if (t.tensors[i].name == name && t.tensors[i].is_output == output) return i;
    }
  }
  throw "the table names a tensor that it does not have";
}

constexpr Condition condition(const Table& t, std::string_view text) {
  Condition out{};
  while (!text.empty()) {
    const size_t bar = text.find('|');
    std::string_view term = text.substr(0, bar);
    ConditionTerm c{};
    if (term.front() == '!') {
      c.negated = true;
      term = term.substr(1);
    }
    const size_t equals = term.find('=');
    const std::string_view name = term.substr(0, equals);
    bool found = false;
    for (uint8_t i = 0; i < t.attribute_count; ++i) {
      if (t.attributes[i].name != name) continue;
      const AttributeType type = t.attributes[i].type;
      if (type != AttributeType::boolean && type != AttributeType::choice) {
        throw "a condition names an attribute that is neither boolean nor a choice";
      }
      c.kind = ConditionTerm::attribute;
      c.call_only = t.attributes[i].call_only;
      c.index = i;
      if (equals != std::string_view::npos) {
        const int choice = choice_index(t.attributes[i].choices, term.substr(equals + 1));
        if (choice < 0) throw "the condition names an unknown choice";
        c.value = static_cast<uint8_t>(choice);
      }
      found = true;
    }
    if (!found) c.index = find_tensor(t, name);
    out.any[out.count++] = c;
    text = bar == std::string_view::npos ? std::string_view{} : text.substr(bar + 1);
  }
  return out;
}

template <size_t Steps>
constexpr void mention(Table& t, const BasicExpression<Steps>& e) {
  for (uint8_t i = 0; i < e.count; ++i) {
    if (e.steps[i].code == ExpressionStep::variable) t.symbols |= 1U << e.steps[i].value;
  }
}

constexpr void resolve_group(const Table& t, GroupSpec& g) {
  std::string_view text = g.text;
  bool second = false;
  while (!text.empty()) {
    const size_t blank = text.find(' ');
    const std::string_view word = text.substr(0, blank);
    if (word == "|") {
      second = true;
    } else {
      const bool is_input = [&] {
        for (uint8_t i = 0; i < t.tensor_count; ++i) {
          if (t.tensors[i].name == word && !t.tensors[i].is_output) return true;
        }
        return false;
      }();
      const uint8_t index = find_tensor(t, word, is_input);
      if (second) {
        g.second[g.second_count++] = index;
        g.second_set |= TensorSet{1} << index;
      } else {
        g.first[g.first_count++] = index;
        g.first_set |= TensorSet{1} << index;
      }
    }
    text = blank == std::string_view::npos ? std::string_view{} : text.substr(blank + 1);
  }
  g.of_outputs = t.tensors[g.first[0]].is_output;
}

constexpr void resolve(Table& t) {
  for (uint8_t i = 0; i < t.tensor_count; ++i) {
    TensorSpec& s = t.tensors[i];
    if (!s.is_output) t.inputs |= TensorSet{1} << i;
    if (!s.is_output && !s.is_optional) t.required_inputs |= TensorSet{1} << i;
    if (s.is_list) {
      t.lists |= TensorSet{1} << i;
      if (s.length.count == 0 || s.name.substr(s.name.size() - 2) != ".L") {
        throw "a list is named 'stem.L' and counts something";
      }
      if (!s.condition_text.empty() || !s.alias.empty()) {
        throw "lists have neither conditions nor aliases";
      }
      mention(t, s.length);
    }
    s.condition = condition(t, s.condition_text);
    s.second_condition = condition(t, s.other_layout);
    for (uint8_t k = 0; k < s.shape.rank; ++k) mention(t, s.shape.dims[k]);
    if (!s.alias.empty()) s.alias_index = static_cast<int8_t>(find_tensor(t, s.alias));
    // Leading dimensions stand for T only where no axis comes before it, no sequence crosses it,
    // and the rank says how many there are.
    if (s.name == "cu_seqlens") t.flattens = false;
    for (uint8_t k = 1; k < s.shape.rank; ++k) {
      const Expression& e = s.shape.dims[k];
      if (e.optional_axis || (e.is_symbol() && e.steps[0].value == symbol("T"))) t.flattens = false;
    }
    if (s.dtype_source.empty()) continue;
    bool found = false;
    for (uint8_t k = 0; k < t.attribute_count; ++k) {
      if (t.attributes[k].name != s.dtype_source) continue;
      s.dtype_source_is_attribute = true;
      s.dtype_source_index = k;
      found = true;
    }
    if (!found) s.dtype_source_index = find_tensor(t, s.dtype_source);
  }
  for (uint8_t i = 0; i < t.attribute_count; ++i) {
    AttributeSpec& a = t.attributes[i];
    a.required = condition(t, a.required_text);
    mention(t, a.binds);
  }
  for (uint8_t i = 0; i < t.group_count; ++i) resolve_group(t, t.groups[i]);
  for (uint8_t i = 0; i < t.flop_count; ++i) {
    FlopTerm& f = t.flops[i];
    f.condition = condition(t, f.condition_text);
    const uint32_t of_shapes = t.symbols;
    mention(t, f.count);
    if (t.symbols != of_shapes) throw "flops name a symbol that no shape or attribute has";
  }
  for (uint8_t i = 0; i < t.default_count; ++i) {
    t.defaults[i].index = symbol(t.defaults[i].symbol_name);
    t.defaults[i].tensor_index = find_tensor(t, t.defaults[i].unless_tensor);
  }
}

}  // namespace build

// The table of an operator: its items in the order of the documentation.
template <class... Items>
constexpr Table table(std::string_view name, std::string_view section, std::string_view summary,
                      const Items&... items) {
  Table t{};
  t.name = name;
  t.section = section;
  t.summary = summary;
  (t.add(items), ...);
  build::resolve(t);
  return t;
}

}  // namespace ehc
