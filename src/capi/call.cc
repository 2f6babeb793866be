// Calls of the C interface: arguments become a DynamicCall.
#include "capi/context.h"
#include "capi/describe.h"
#include "capi/status.h"
#include "capi/tensor.h"
#include "core/dynamic_call.h"
#include "ehc/error.h"

namespace ehc::capi {

namespace {

template <class T>
std::span<const T> list(const T* data, size_t count, const char* function, const char* argument) {
  if (data == nullptr && count > 0) {
    fail_argument(function, argument, "a pointer", "null with a count of " + std::to_string(count));
  }
  return {data, count};
}

// A count that no table can need is a mistake of the caller, and would read beyond its memory.
void check_count(const Schema& schema, const char* what, size_t count, size_t most) {
  if (count <= most) return;
  fail(schema, std::string(what) + ": expected at most " + std::to_string(most) + ", got " +
                   std::to_string(count));
}

constexpr size_t kMostNamed = size_t{1} << 16;  // tensors of an operator that has lists

void set_tensors(DynamicCall& call, const ehc_arguments& arguments, const char* function) {
  const Schema& schema = call.schema();
  const auto tensors = list(arguments.tensors, arguments.tensor_count, function, "tensors");
  check_count(schema, "tensors", tensors.size(), schema.tensors.size());
  check_count(schema, "named_tensors", arguments.named_tensor_count,
              schema.lists != 0 ? kMostNamed : schema.tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i] == nullptr) continue;
    const TensorSpec& spec = schema.tensors[i];
    if (spec.is_list) {
      fail_tensor(schema, spec.name, "a list: named_tensors, '" + spec.name_of(0) + "' and so on",
                  "a tensor by position");
    }
    call.tensor(call.slot_at(i)) = to_tensor(*tensors[i], schema, spec.name);
  }
  for (const ehc_named_tensor& named :
       list(arguments.named_tensors, arguments.named_tensor_count, function, "named_tensors")) {
    const char* name = &not_null(named.name, function, "named_tensors", "names");
    const Tensor tensor =
        named.tensor != nullptr ? to_tensor(*named.tensor, schema, name) : Tensor{};
    if (named.is_output != 0) {
      call.set_output(name, tensor);
    } else {
      call.set_input(name, tensor);
    }
  }
}

constexpr size_t kMostIntegers = size_t{1} << 20;  // of one attribute

std::string_view attribute_name(const Schema& schema, const ehc_attribute& attribute) {
  if (attribute.name != nullptr) return attribute.name;
  if (attribute.position < 0 ||
      static_cast<size_t>(attribute.position) >= schema.attributes.size()) {
    fail(schema, "attributes: expected positions below " +
                     std::to_string(schema.attributes.size()) + ", got " +
                     std::to_string(attribute.position));
  }
  return schema.attributes[static_cast<size_t>(attribute.position)].name;
}

void set_attribute(DynamicCall& call, const ehc_attribute& attribute) {
  const Schema& schema = call.schema();
  const std::string_view name = attribute_name(schema, attribute);
  switch (attribute.type) {
    case EHC_INTEGER:
      return call.set_attribute(name, attribute.integer);
    case EHC_REAL:
      return call.set_attribute(name, attribute.real);
    case EHC_BOOLEAN:
      if (attribute.integer != 0 && attribute.integer != 1) {
        fail_attribute(schema, name, "a boolean of 0 or 1", std::to_string(attribute.integer));
      }
      return call.set_attribute(name, attribute.integer == 1);
    case EHC_CHOICE:
      return call.set_choice(name, attribute.integer);
    case EHC_INTEGERS:
      if (attribute.integers == nullptr && attribute.count > 0) {
        fail_attribute(schema, name, "a pointer to integers", "null");
      }
      if (attribute.count > kMostIntegers) {
        fail_attribute(schema, name, "at most " + std::to_string(kMostIntegers) + " integers",
                       std::to_string(attribute.count));
      }
      return call.set_attribute(
          name, std::vector<int64_t>(attribute.integers, attribute.integers + attribute.count));
    case EHC_TEXT:
      if (attribute.text == nullptr) fail_attribute(schema, name, "a text", "null");
      return call.set_attribute_text(name, attribute.text);
    default:
      fail_attribute(schema, name, "an ehc_attribute_type", std::to_string(attribute.type));
  }
}

const Operator& operator_of(const ehc_operator* op, const char* function) {
  return *not_null(op, function, "op", "an operator").op;
}

void set_arguments(DynamicCall& call, const ehc_arguments* arguments, const char* function) {
  const ehc_arguments& all = not_null(arguments, function, "arguments", "arguments");
  set_tensors(call, all, function);
  check_count(call.schema(), "attributes", all.attribute_count, call.schema().attributes.size());
  for (const ehc_attribute& attribute :
       list(all.attributes, all.attribute_count, function, "attributes")) {
    set_attribute(call, attribute);
  }
}

}  // namespace

}  // namespace ehc::capi

using namespace ehc::capi;

extern "C" {

ehc_status ehc_run(ehc_context* context, const ehc_operator* op, const ehc_arguments* arguments) {
  return guarded([&] {
    ehc::Context& where = not_null(context, "ehc_run", "context", "a context").context;
    ehc::DynamicCall call(operator_of(op, "ehc_run"));
    set_arguments(call, arguments, "ehc_run");
    call.run(where);
  });
}

ehc_status ehc_infer_outputs(const ehc_operator* op, const ehc_arguments* arguments,
                             ehc_layout* layouts, size_t layout_count) {
  return guarded([&] {
    ehc::DynamicCall call(operator_of(op, "ehc_infer_outputs"));
    set_arguments(call, arguments, "ehc_infer_outputs");
    not_null(layouts, "ehc_infer_outputs", "layouts", "a place for them");
    const std::vector<ehc::Tensor> outputs = call.output_types();
    if (layout_count != outputs.size()) {
      const std::string expected = std::to_string(outputs.size());
      fail_argument("ehc_infer_outputs", "layout_count", expected.c_str(),
                    std::to_string(layout_count));
    }
    for (size_t i = 0; i < layout_count; ++i) layouts[i] = to_layout(outputs[i]);
  });
}

ehc_status ehc_workspace_bytes(const ehc_context* context, const ehc_operator* op,
                               const ehc_arguments* arguments, size_t* bytes) {
  return guarded([&] {
    const ehc::Context& where =
        not_null(context, "ehc_workspace_bytes", "context", "a context").context;
    size_t& out = not_null(bytes, "ehc_workspace_bytes", "bytes", "a place for it");
    ehc::DynamicCall call(operator_of(op, "ehc_workspace_bytes"));
    set_arguments(call, arguments, "ehc_workspace_bytes");
    out = call.plan(where).workspace_bytes;
  });
}

}  // extern "C"
