// An operator at run time: its table, the rules that a table cannot say, and the ordered list of
// its implementations.
#pragma once

#include <new>
#include <span>
#include <string>

#include "core/bind.h"
#include "core/schema_builder.h"
#include "ehc/context.h"

namespace ehc {

struct Call {
  Context& context;
  const Bound& bound;
  const void* params;  // checked, leading dimensions flattened
};

// One way to compute an operator. The list goes from the most special to the reference; the first
// that does not refuse runs.
struct Implementation {
  std::string_view name;  // "cpu.avx512", "cuda", "reference"
  Device device = Device::cpu;
  // Why this call cannot run here, or empty. Null: never refuses.
  std::string (*refuse)(const Call& call) = nullptr;
  void (*run)(const Call& call) = nullptr;
  // Bytes of scratch that `run` needs. Null: none.
  size_t (*workspace)(const Call& call) = nullptr;
};

struct Operator {
  Schema schema;
  std::span<const Implementation> implementations;
  Derive derive = nullptr;
  // Rules in code; throws Error{contract}. Null: none.
  void (*rules)(const Schema& schema, const Bound& bound, const void* params) = nullptr;
  size_t params_size = 0;
  void (*construct)(void* params) = nullptr;
};

// Completes an operator for its parameter struct.
template <class P>
constexpr Operator make_operator(const Table& table, std::span<const Implementation> list) {
  static_assert(std::is_trivially_copyable_v<P>);
  Operator op{};
  op.schema = table.view();
  op.implementations = list;
  op.params_size = sizeof(P);
  op.construct = [](void* at) { new (at) P(); };
  return op;
}

// The front door alone: everything that `invoke` checks before it chooses an implementation.
Bound check_call(const Operator& op, const Arguments& args, Device device, int device_index);

// Checks and runs. `args.params` is changed: leading dimensions are flattened.
void invoke(const Operator& op, Context& context, const Arguments& args);
size_t workspace_bytes(const Operator& op, const Context& context, const Arguments& args);

// The same for a typed C++ call.
template <class P>
void invoke(const Operator& op, Context& context, const P& params) {
  P local = params;
  invoke(op, context, Arguments{&local, nullptr});
}
template <class P>
size_t workspace_bytes(const Operator& op, const Context& context, const P& params) {
  P local = params;
  return workspace_bytes(op, context, Arguments{&local, nullptr});
}

}  // namespace ehc
