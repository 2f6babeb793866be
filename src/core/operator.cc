#include "core/operator.h"

#include <algorithm>
#include <string>

#include "core/targets.h"

namespace ehc {

bool names_implementation(std::string_view wanted, std::string_view name) {
  if (wanted.empty() || wanted == name) return true;
  return name.size() > wanted.size() && name.starts_with(wanted) && name[wanted.size()] == '.';
}

namespace {

// The first implementation that takes the call, or null. Those before it go to `refused`.
const Implementation* choose(const Operator& op, const Call& call,
                             std::vector<Plan::Refusal>* refused) {
  const std::string& wanted = call.context.implementation();
  const bool is_whole_name = std::any_of(
      op.implementations.begin(), op.implementations.end(), [&](const Implementation& impl) {
        return impl.device == call.context.device() && impl.name == wanted;
      });
  for (const Implementation& impl : op.implementations) {
    if (impl.device != call.context.device()) continue;
    if (is_whole_name && impl.name != wanted) continue;
    if (!names_implementation(wanted, impl.name)) continue;
    const std::string_view reason = impl.refuse != nullptr ? impl.refuse(call) : std::string_view();
    if (reason.empty()) return &impl;
    if (refused != nullptr) refused->push_back({impl.name, reason});
  }
  return nullptr;
}

std::string text_of(const std::vector<Plan::Refusal>& refused) {
  std::string text;
  for (const auto& [implementation, reason] : refused) {
    text += "; " + std::string(implementation) + " refused: " + std::string(reason);
  }
  return text;
}

[[noreturn]] void fail_choice(const Operator& op, const Call& call) {
  const Context& context = call.context;
  const std::string& wanted = context.implementation();
  std::vector<Plan::Refusal> refused;
  choose(op, call, &refused);
  std::string text = std::string(op.schema.name) + ": ";
  if (refused.empty() && !wanted.empty()) {
    text += "implementation '" + wanted + "': expected one of";
    for (const Implementation& impl : op.implementations) {
      if (impl.device == context.device()) text += " " + std::string(impl.name);
    }
    throw Error(ErrorKind::unavailable, text + ", got '" + wanted + "'");
  }
  const char* device = context.device() == Device::cpu ? "cpu" : "cuda";
  throw Error(ErrorKind::unavailable,
              text + "no implementation on " + device + " takes this call" + text_of(refused));
}

size_t scratch_of(const Implementation& impl, const Call& call) {
  return impl.workspace != nullptr ? impl.workspace(call) : 0;
}

void check(FrontDoor& door, const Operator& op, Device device, int device_index) {
  door.bind_inputs(op.derive);
  door.check_outputs();
  door.check_layout(device, device_index);
  if (op.rules != nullptr) op.rules(op.schema, door.bound(), door.params());
}

}  // namespace

Bound check_call(const Operator& op, const Arguments& args, Device device, int device_index) {
  FrontDoor door(op.schema, args);
  check(door, op, device, device_index);
  return door.bound();
}

void invoke(const Operator& op, Context& context, const Arguments& args) {
  FrontDoor door(op.schema, args);
  check(door, op, context.device(), context.device_index());
  const Call call{context, door.bound(), door.params()};
  const Implementation* impl = choose(op, call, nullptr);
  if (impl == nullptr) fail_choice(op, call);
  if (context.log()) {
    std::vector<Plan::Refusal> refused;
    choose(op, call, &refused);
    context.log()(std::string(op.schema.name) + ": " + std::string(impl->name) + text_of(refused));
  }
  if (const size_t needed = scratch_of(*impl, call); needed > 0) {
    if (needed > context.workspace_bytes()) {
      fail(op.schema, "workspace: expected at least " + std::to_string(needed) + " bytes, got " +
                          std::to_string(context.workspace_bytes()));
    }
    door.check_workspace(context.workspace(), needed);
  }
  if (!write_targets_of_nothing(op.schema, call)) impl->run(call);
}

Plan plan(const Operator& op, const Context& context, const Arguments& args) {
  Context copy = context;
  FrontDoor door(op.schema, args);
  check(door, op, context.device(), context.device_index());
  const Call call{copy, door.bound(), door.params()};
  Plan out;
  const Implementation* impl = choose(op, call, &out.refused);
  if (impl == nullptr) fail_choice(op, call);
  out.implementation = impl->name;
  out.workspace_bytes = scratch_of(*impl, call);
  return out;
}

}  // namespace ehc
