#include "cli/op_list.h"

#include <fmt/core.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/registry.h"

namespace ehc::cli {

namespace {

using Json = nlohmann::ordered_json;

Json split(std::string_view text, char at) {
  Json out = Json::array();
  while (true) {
    const size_t end = text.find(at);
    out.push_back(std::string(text.substr(0, end)));
    if (end == std::string_view::npos) return out;
    text = text.substr(end + 1);
  }
}

Json dtypes(const TensorSpec& s) {
  Json out = Json::array();
  for (const DType type : {DType::bf16, DType::f16, DType::f32, DType::f8_e4m3, DType::f8_e8m0,
                           DType::i32, DType::i64, DType::u8, DType::boolean}) {
    if (contains(s.dtypes, type)) out.push_back(std::string(name_of(type)));
  }
  return out;
}

std::string shape(const TensorSpec& s) {
  return std::string(s.pattern.substr(s.pattern.find('[')));
}

Json number(double x) {
  if (x == std::floor(x) && std::fabs(x) < 9e15) return static_cast<int64_t>(x);
  return x;
}

Json attribute_json(const Operator& op, size_t index) {
  constexpr const char* kTypes[] = {"int", "float", "bool", "string", "ints"};
  const AttributeSpec& a = op.schema.attributes[index];
  Json out;
  out["name"] = std::string(a.name);
  out["type"] = kTypes[static_cast<int>(a.type)];
  std::vector<std::byte> params(op.schema.params_size);
  op.construct(params.data());
  const AttributeValue v = a.get != nullptr ? a.get(params.data()) : a.call_default;
  if (v.present) {
    if (a.type == AttributeType::boolean) {
      out["default"] = v.integer != 0;
    } else if (a.type == AttributeType::choice) {
      out["default"] = std::string(choice_name(a.choices, v.integer));
    } else if (a.type == AttributeType::real) {
      out["default"] = v.real;
    } else {
      out["default"] = v.integer;
    }
  } else if (!a.computed.empty()) {
    out["default"] = std::string(a.computed);
  } else if (!a.required_text.empty()) {
    out[a.required_unless ? "required_without" : "required_with"] = std::string(a.required_text);
  } else {
    out["required"] = true;
  }
  if (!a.choices.empty()) out["values"] = split(a.choices, '/');
  if (a.has_range) {
    const std::string low = number(a.least).dump();
    if (!std::isinf(a.most)) {
      out["range"] = "[" + low + ".." + number(a.most).dump() + "]";
    } else {
      out["range"] = "[" + std::string(a.least_is_open ? "> " : ">= ") + low + "]";
    }
  }
  return out;
}

Json operator_json(const Operator& op) {
  Json out;
  out["name"] = std::string(op.schema.name);
  out["section"] = std::string(op.schema.section);
  out["summary"] = std::string(op.schema.summary);
  out["devices"] = Json::array();
  out["impls"] = Json::object();
  for (const Device device : {Device::cpu, Device::cuda}) {
    Json names = Json::array();
    for (const Implementation& impl : op.implementations) {
      if (impl.device == device) names.push_back(std::string(impl.name));
    }
    if (names.empty()) continue;
    const char* name = device == Device::cpu ? "cpu" : "cuda";
    out["devices"].push_back(name);
    out["impls"][name] = names;
  }
  out["inputs"] = Json::array();
  out["outputs"] = Json::array();
  for (const TensorSpec& s : op.schema.tensors) {
    if (!s.is_output) {
      out["inputs"].push_back({{"name", std::string(s.name)},
                               {"dtypes", dtypes(s)},
                               {"shape", shape(s)},
                               {"optional", s.is_optional}});
    } else {
      const std::string_view type = s.pattern.substr(0, s.pattern.find('['));
      const std::string dtype(type.starts_with("X:") ? "X" : type);
      Json o = {{"name", std::string(s.name)}, {"dtype", dtype}, {"shape", shape(s)}};
      if (!s.condition_text.empty()) o["condition"] = std::string(s.condition_text);
      out["outputs"].push_back(o);
    }
  }
  out["attributes"] = Json::array();
  for (size_t i = 0; i < op.schema.attributes.size(); ++i) {
    out["attributes"].push_back(attribute_json(op, i));
  }
  return out;
}

}  // namespace

void print_operator_list(bool as_json) {
  if (as_json) {
    Json all = Json::array();
    for (const Operator* op : all_operators()) all.push_back(operator_json(*op));
    fmt::print("{}\n", all.dump(1));
    return;
  }
  for (const Operator* op : all_operators()) {
    fmt::print("{:<32} {:<8} {}\n", op->schema.name, op->schema.section, op->schema.summary);
  }
}

}  // namespace ehc::cli
