#include "core/operator.h"

#include <string>

namespace ehc {

namespace {

// "cpu" names every "cpu.*".
bool selected(const Implementation& impl, std::string_view wanted) {
  return wanted.empty() || impl.name == wanted ||
         (impl.name.size() > wanted.size() && impl.name.substr(0, wanted.size()) == wanted &&
          impl.name[wanted.size()] == '.');
}

const Implementation& choose(const Operator& op, const Call& call) {
  const Context& context = call.context;
  const std::string& wanted = context.implementation();
  std::string refusals;
  bool known = false;
  for (const Implementation& impl : op.implementations) {
    if (impl.device != context.device() || !selected(impl, wanted)) continue;
    known = true;
    const std::string reason = impl.refuse != nullptr ? impl.refuse(call) : std::string();
    if (reason.empty()) {
      if (context.log()) {
        context.log()(std::string(op.schema.name) + ": " + std::string(impl.name) + refusals);
      }
      return impl;
    }
    refusals += "; " + std::string(impl.name) + " refused: " + reason;
  }
  const char* device = context.device() == Device::cpu ? "cpu" : "cuda";
  std::string text = std::string(op.schema.name) + ": ";
  if (!known && !wanted.empty()) {
    text += "implementation '" + wanted + "': expected one of";
    for (const Implementation& impl : op.implementations) {
      if (impl.device == context.device()) text += " " + std::string(impl.name);
    }
    throw Error(ErrorKind::unavailable, text + ", got '" + wanted + "'");
  }
  throw Error(ErrorKind::unavailable,
              text + "no implementation on " + device + " takes this call" + refusals);
}

}  // namespace

Bound check_call(const Operator& op, const Arguments& args, Device device, int device_index) {
  Bound bound = bind_inputs(op.schema, args, op.derive);
  check_outputs(op.schema, args, bound);
  check_layout(op.schema, args, bound, device, device_index);
  if (op.rules != nullptr) op.rules(op.schema, bound, args.params);
  return bound;
}

void invoke(const Operator& op, Context& context, const Arguments& args) {
  const Bound bound = check_call(op, args, context.device(), context.device_index());
  const Call call{context, bound, args.params};
  const Implementation& impl = choose(op, call);
  const size_t needed = impl.workspace != nullptr ? impl.workspace(call) : 0;
  if (needed > context.workspace_bytes()) {
    fail(op.schema, "workspace: expected at least " + std::to_string(needed) + " bytes, got " +
                        std::to_string(context.workspace_bytes()));
  }
  impl.run(call);
}

size_t workspace_bytes(const Operator& op, const Context& context, const Arguments& args) {
  Context copy = context;
  const Bound bound = check_call(op, args, context.device(), context.device_index());
  const Call call{copy, bound, args.params};
  const Implementation& impl = choose(op, call);
  return impl.workspace != nullptr ? impl.workspace(call) : 0;
}

}  // namespace ehc
