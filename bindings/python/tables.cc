#include "tables.h"

#include <nlohmann/json.hpp>
#include <vector>

#include "arguments.h"
#include "ehc/c_api.h"

namespace ehc::python {

namespace {

using nlohmann::json;

json tensor_json(const ehc_tensor_info& info) {
  json types = json::array();
  for (size_t i = 0; i < info.dtype_count; ++i) types.push_back(type_name(info.dtypes[i]));
  return {{"name", info.name},
          {"pattern", info.pattern},
          {"dtypes", types},
          {"is_output", info.is_output != 0},
          {"is_optional", info.is_optional != 0},
          {"is_list", info.is_list != 0},
          {"condition", info.condition},
          {"alias", info.alias}};
}

json default_json(const ehc_attribute_info& info) {
  if (info.has_default == 0) return nullptr;
  if (info.type == EHC_REAL) return info.default_real;
  if (info.type == EHC_BOOLEAN) return info.default_integer != 0;
  return info.default_integer;
}

json attribute_json(const ehc_attribute_info& info) {
  static constexpr const char* kTypes[] = {"int", "float", "bool", "choice", "ints"};
  return {{"name", info.name},
          {"type", kTypes[info.type]},
          {"choices", info.choices},
          {"has_default", info.has_default != 0},
          {"default", default_json(info)},
          {"computed", info.computed},
          {"needed_with", info.needed_with},
          {"needed_without", info.needed_without}};
}

json operator_json(const ehc_operator* op) {
  const ehc_op_info& info = *ehc_op_describe(op);
  json tensors = json::array();
  for (size_t i = 0; i < info.tensor_count; ++i)
    tensors.push_back(tensor_json(*ehc_op_tensor(op, i)));
  json attributes = json::array();
  for (size_t i = 0; i < info.attribute_count; ++i) {
    attributes.push_back(attribute_json(*ehc_op_attribute(op, i)));
  }
  json implementations = json::array();
  for (size_t i = 0; i < info.implementation_count; ++i) {
    const ehc_implementation_info& impl = *ehc_op_implementation(op, i);
    implementations.push_back(
        {{"name", impl.name}, {"device", impl.device_type == EHC_CUDA ? "cuda" : "cpu"}});
  }
  return {{"name", info.name},  {"section", info.section},  {"summary", info.summary},
          {"tensors", tensors}, {"attributes", attributes}, {"implementations", implementations}};
}

std::vector<bool> workspace_users() {
  std::vector<bool> out(ehc_op_count());
  for (size_t op = 0; op < out.size(); ++op) {
    const ehc_operator* handle = ehc_op_at(op);
    const size_t count = ehc_op_describe(handle)->implementation_count;
    for (size_t i = 0; i < count; ++i) {
      if (ehc_op_implementation(handle, i)->uses_workspace != 0) out[op] = true;
    }
  }
  return out;
}

}  // namespace

std::string tables_json() {
  json all = json::array();
  for (size_t op = 0; op < ehc_op_count(); ++op) all.push_back(operator_json(ehc_op_at(op)));
  return all.dump();
}

bool uses_workspace(int64_t op) {
  static const std::vector<bool> users = workspace_users();
  return users.at(static_cast<size_t>(op));
}

}  // namespace ehc::python
