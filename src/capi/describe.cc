#include "capi/describe.h"

#include "capi/status.h"
#include "capi/tensor.h"
#include "core/registry.h"
#include "ehc/error.h"

namespace ehc::capi {

namespace {

const char* keep(ehc_operator& out, std::string_view text) {
  return out.texts.emplace_back(text).c_str();
}

ehc_tensor_info describe_tensor(ehc_operator& out, const TensorSpec& spec) {
  std::vector<ehc_dtype>& types = out.dtypes.emplace_back();
  for (int i = 1; i < kDTypeCount; ++i) {
    if (contains(spec.dtypes, static_cast<DType>(i))) types.push_back(kDTypes[i]);
  }
  return {.name = keep(out, spec.name),
          .pattern = keep(out, spec.pattern),
          .dtypes = types.data(),
          .dtype_count = types.size(),
          .is_output = spec.is_output,
          .is_optional = spec.is_optional,
          .is_contiguous = spec.is_packed,
          .is_list = spec.is_list,
          .condition = keep(out, spec.condition_text),
          .alias = spec.is_output ? spec.alias_index : -1};
}

ehc_attribute_info describe_attribute(ehc_operator& out, const AttributeSpec& spec,
                                      const void* default_params) {
  const AttributeValue value = spec.get != nullptr ? spec.get(default_params) : spec.call_default;
  return {.name = keep(out, spec.name),
          .type = static_cast<ehc_attribute_type>(spec.type),
          .choices = keep(out, spec.choices),
          .has_default = value.present,
          .default_integer = value.integer,
          .default_real = value.real,
          .computed = keep(out, spec.computed),
          .needed_with = keep(out, spec.required_unless ? "" : spec.required_text),
          .needed_without = keep(out, spec.required_unless ? spec.required_text : ""),
          .has_range = spec.has_range,
          .least = spec.least,
          .most = spec.most,
          .least_is_open = spec.least_is_open};
}

void describe(ehc_operator& out, const Operator& op) {
  const Schema& schema = op.schema;
  out.op = &op;
  for (const TensorSpec& spec : schema.tensors) {
    out.tensors.push_back(describe_tensor(out, spec));
  }
  std::vector<std::byte> params(op.schema.params_size);
  op.construct(params.data());
  for (const AttributeSpec& spec : schema.attributes) {
    out.attributes.push_back(describe_attribute(out, spec, params.data()));
  }
  for (const Implementation& impl : op.implementations) {
    out.implementations.push_back({.name = keep(out, impl.name),
                                   .device_type = impl.device == Device::cpu ? EHC_HOST : EHC_CUDA,
                                   .uses_workspace = impl.workspace != nullptr});
  }
  out.info = {.name = keep(out, schema.name),
              .section = keep(out, schema.section),
              .summary = keep(out, schema.summary),
              .tensor_count = out.tensors.size(),
              .attribute_count = out.attributes.size(),
              .implementation_count = out.implementations.size()};
}

const std::deque<ehc_operator>& operators() {
  static const std::deque<ehc_operator> all = [] {
    std::deque<ehc_operator> list;
    for (const Operator* op : all_operators()) describe(list.emplace_back(), *op);
    return list;
  }();
  return all;
}

const ehc_operator& checked(const ehc_operator* op, const char* function) {
  return not_null(op, function, "op", "an operator");
}

template <class T>
const T* entry(const ehc_operator* op, const std::vector<T> ehc_operator::*list, size_t position,
               const char* function) {
  return guarded_value<const T*>(nullptr, [&] {
    const std::vector<T>& all = checked(op, function).*list;
    if (position >= all.size()) {
      const std::string expected = "less than " + std::to_string(all.size());
      fail_argument(function, "position", expected.c_str(), std::to_string(position));
    }
    return &all[position];
  });
}

// `find` gives the position by name, or -1.
template <class Find>
int32_t position(const ehc_operator* op, const char* name, const char* function, const char* kind,
                 const Find& find) {
  return guarded_value<int32_t>(-1, [&] {
    const Schema& schema = checked(op, function).op->schema;
    const std::string wanted = &not_null(name, function, "name", "a name");
    const int found = find(schema, wanted);
    if (found < 0) {
      throw Error(ErrorKind::contract,
                  std::string(schema.name) + ": no " + kind + " named '" + wanted + "'");
    }
    return found;
  });
}

}  // namespace

}  // namespace ehc::capi

using namespace ehc::capi;

extern "C" {

size_t ehc_op_count(void) {
  return guarded_value<size_t>(0, [] { return operators().size(); });
}

const ehc_operator* ehc_op_at(size_t position) {
  return guarded_value<const ehc_operator*>(nullptr, [&] {
    if (position >= operators().size()) {
      const std::string expected = "less than " + std::to_string(operators().size());
      fail_argument("ehc_op_at", "position", expected.c_str(), std::to_string(position));
    }
    return &operators()[position];
  });
}

const ehc_operator* ehc_op_find(const char* name) {
  return guarded_value<const ehc_operator*>(nullptr, [&] {
    const std::string_view wanted = &not_null(name, "ehc_op_find", "name", "an operator's name");
    for (const ehc_operator& op : operators()) {
      if (op.op->schema.name == wanted) return &op;
    }
    throw ehc::Error(ehc::ErrorKind::contract, "unknown operator '" + std::string(wanted) + "'");
  });
}

const ehc_op_info* ehc_op_describe(const ehc_operator* op) {
  return guarded_value<const ehc_op_info*>(nullptr,
                                           [&] { return &checked(op, "ehc_op_describe").info; });
}
const ehc_tensor_info* ehc_op_tensor(const ehc_operator* op, size_t position) {
  return entry(op, &ehc_operator::tensors, position, "ehc_op_tensor");
}
const ehc_attribute_info* ehc_op_attribute(const ehc_operator* op, size_t position) {
  return entry(op, &ehc_operator::attributes, position, "ehc_op_attribute");
}
const ehc_implementation_info* ehc_op_implementation(const ehc_operator* op, size_t position) {
  return entry(op, &ehc_operator::implementations, position, "ehc_op_implementation");
}

int32_t ehc_op_input_position(const ehc_operator* op, const char* name) {
  return position(
      op, name, "ehc_op_input_position", "input",
      [](const ehc::Schema& s, const std::string& n) { return s.tensor_index(n, false); });
}
int32_t ehc_op_output_position(const ehc_operator* op, const char* name) {
  return position(
      op, name, "ehc_op_output_position", "output",
      [](const ehc::Schema& s, const std::string& n) { return s.tensor_index(n, true); });
}
int32_t ehc_op_attribute_position(const ehc_operator* op, const char* name) {
  return position(op, name, "ehc_op_attribute_position", "attribute",
                  [](const ehc::Schema& s, const std::string& n) { return s.attribute_index(n); });
}

}  // extern "C"
